"""A build: the source archive, the compilation, the cache of wheels, the check, and its steps together."""

import dataclasses
import hashlib
import os
from pathlib import Path

import psutil
import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import building
from hvdtrain.horovod_build import cache as source
from hvdtrain.horovod_build.building import build_horovod
from hvdtrain.horovod_build.installed import InstalledBuild
from hvdtrain.horovod_build.plan import BuildRequest
from hvdtrain.horovod_build.toolchain import Gpu


def test_another_archive_is_downloaded_again_and_refused(cache, tmp_path, monkeypatch):
    kept = cache.folder / "source" / source.SDIST
    kept.write_bytes(b"damaged")
    with pytest.raises(HorovodBuildError, match="sha256"):
        source.unpack(kept, tmp_path)
    monkeypatch.setattr(source, "_download", lambda folder: (folder / source.SDIST).write_bytes(b"whole"))
    monkeypatch.setattr(source, "SDIST_SHA256", hashlib.sha256(b"whole").hexdigest())
    assert source.fetch_source(cache).read_bytes() == b"whole"


@pytest.mark.parametrize(("owner", "mode"), [(os.geteuid(), 0o775), (os.geteuid(), 0o757), (1003, 0o700)])
def test_a_cache_is_its_users_alone(cache, steps, owner, mode):
    if os.geteuid() and owner == 1003:
        pytest.skip("root alone gives files away")
    place = cache.folder / "wheels"
    os.chown(place, owner, -1)
    place.chmod(mode)
    with pytest.raises(HorovodBuildError, match=f"Others can write into the cache {place}"):
        steps.build()
    assert not steps.ran


def test_the_check_is_not_part_of_an_outer_job(the_plan):
    outer = {"HOROVOD_RANK": "3", "SLURM_JOB_ID": "1", "OMPI_COMM_WORLD_RANK": "0"}
    env = building.check_environment(the_plan, {**outer, "OMPI_MCA_btl": "tcp", "A": "b"})
    assert not {*outer} & {*env}
    assert (env["OMPI_MCA_btl"], env["A"]) == ("tcp", "b")
    assert env["PATH"].startswith(str(the_plan.mpi.programs))


@pytest.mark.parametrize(
    ("script", "seconds", "fault"),
    [
        ("raise OSError('undefined symbol')", 60, r"exit code 1(.|\n)*undefined symbol"),
        ("import time; time.sleep(60)", 0.5, "did not end in time"),
    ],
)
def test_a_check_that_does_not_work_is_an_error_with_the_output(
    the_plan, monkeypatch, script, seconds, fault
):
    monkeypatch.setattr(building, "_ALL_REDUCE", {"torch": script})
    monkeypatch.setattr(building, "CHECK_LIMIT_SECONDS", seconds)
    with pytest.raises(HorovodBuildError, match=fault):
        building.check_build(the_plan, lambda line: None)


def test_an_mpi_that_needs_mpirun_is_noted_and_gloo_is_tried(the_plan, monkeypatch):
    script = "import os; assert os.environ.get('HOROVOD_CONTROLLER') == 'gloo', 'no PMIx server'"
    monkeypatch.setattr(building, "_ALL_REDUCE", {"torch": script, "tf": ""})
    said = []
    building.check_build(the_plan, said.append)
    assert said[0].startswith("With PyTorch, MPI did not work in a process without mpirun: exit code 1.")
    assert "no PMIx server" in said[0]
    assert said[1].startswith("Gloo did.")
    assert said[2:] == ["It works with PyTorch.", "It works with TensorFlow."]


class Steps:
    """What a build did, whether its check raises, and what is installed."""

    def __init__(self):
        self.ran, self.said = [], []
        self.fails = None
        self.installed = None

    def build(self, **options):
        self.ran.clear()
        self.said.clear()
        return build_horovod(BuildRequest(**options), self.said.append)


@pytest.fixture
def steps(cache, wheel, the_plan, monkeypatch):
    """A build whose steps only write down that they ran."""
    steps = Steps()
    ours = InstalledBuild("0.28.1", "2.13.0+cpu", "2.21.0", "Open MPI 5", True, False, "e", the_plan.key)

    def compile_wheel(plan, into, jobs, echo):
        steps.ran.append("compile")
        return into.store(plan.key, wheel)

    def pip(*arguments):
        steps.ran.append(arguments[0])
        steps.installed = ours if arguments[0] == "install" else None

    def check(plan, echo):
        steps.ran.append("check")
        if steps.fails:
            raise steps.fails

    monkeypatch.setattr(building, "make_plan", lambda request: the_plan)
    monkeypatch.setattr(building, "compile_wheel", compile_wheel)
    monkeypatch.setattr(building, "_pip", pip)
    monkeypatch.setattr(building, "check_build", check)
    monkeypatch.setattr(building, "installed_build", lambda: steps.installed)
    return steps


def test_a_build_is_compiled_once_and_installed_and_checked_again_where_it_is_not(
    steps, cache, wheel, the_plan
):
    assert steps.build().key == the_plan.key
    assert steps.ran == ["compile", "install", "check"]
    stored = cache.wheel(the_plan.key)
    assert (stored.name, stored.read_bytes()) == (wheel.name, wheel.read_bytes())
    assert cache.wheel("other") is None
    steps.build()
    assert steps.ran == []
    steps.installed = None
    steps.build()
    assert steps.ran == ["install", "check"]


@pytest.mark.parametrize(
    ("fault", "keeps_wheel"), [(HorovodBuildError("no all-reduce"), False), (KeyboardInterrupt(), True)]
)
def test_a_check_that_fails_leaves_nothing_behind_and_an_interrupted_one_the_wheel(
    steps, cache, the_plan, fault, keeps_wheel
):
    steps.fails = fault
    with pytest.raises(type(fault)):
        steps.build()
    assert steps.ran == ["compile", "install", "check", "uninstall"]
    assert (cache.wheel(the_plan.key) is not None) == keeps_wheel
    assert steps.installed is None


def test_the_users_own_variables_do_not_reach_the_build(the_plan, tmp_path, monkeypatch):
    others = ("HOROVOD_WITH_MXNET", "HOROVOD_CPU_OPERATIONS", "CMAKE_BUILD_TYPE", "CCL_ROOT", "MAKELEVEL")
    for name in others:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("MAKEFLAGS", "w -- jobserver")
    env = building.build_environment(the_plan, tmp_path, jobs=3)
    assert not {*others} & {*env}
    assert env["MAKEFLAGS"] == "-j3"
    assert env["HVDTRAIN_RPATH"] == "$ORIGIN/../../../.."
    assert [env[f"HOROVOD_WITH_{name}"] for name in ("MPI", "PYTORCH", "TENSORFLOW")] == ["1"] * 3


def test_gpu_libraries_get_the_names_that_cmake_looks_for(the_plan, tmp_path):
    runtime = tmp_path / "cuda" / "lib" / "libcudart.so.13"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    gpu = Gpu(tmp_path / "cuda", "13.0", Path("/nccl/include"), Path("/nccl/lib/libnccl.so.2"), "2.28.9")
    env = building.build_environment(dataclasses.replace(the_plan, gpu=gpu), tmp_path, jobs=1)
    home = Path(env["HOROVOD_NCCL_HOME"])
    assert (home / "lib" / "libnccl.so").readlink() == gpu.nccl_library
    assert (home / "include").readlink() == gpu.nccl_headers
    assert (home / "lib" / "libcudart.so").readlink() == runtime
    assert env["CMAKE_LIBRARY_PATH"] == str(home / "lib")
    assert env["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert env["PATH"].split(":")[1] == str(tmp_path / "cuda" / "bin")


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE  # nobody may collect it
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def run(tmp_path, program):
    """Runs a shell script as the build runs its programs."""

    def run(script: str, echo=print) -> list[str]:
        path = program(tmp_path / "script", script)
        return building.run_logged([str(path)], tmp_path / "log", dict(os.environ), tmp_path, echo)

    return run


def test_a_command_that_takes_too_long_ends_with_everything_it_started(run, monkeypatch, tmp_path):
    monkeypatch.setattr(building, "COMPILE_LIMIT_SECONDS", 1)
    lines = run("sh -c 'trap \"\" TERM; echo $$; sleep 60; sleep 60' & wait")
    assert ended(int(lines[0]))
    error = building._compile_error(lines, tmp_path / "log")
    assert "not done after 1 seconds" in error.problem
    assert str(tmp_path / "log") in error.remedy


def test_a_command_ends_when_its_caller_is_interrupted(run, tmp_path):
    pids = []

    def interrupt(line: str) -> None:
        pids.append(int((tmp_path / "log").read_text().split()[0]))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("echo $$; echo '[ 50%] Building'; exec sleep 60", echo=interrupt)
    assert ended(pids[0])
