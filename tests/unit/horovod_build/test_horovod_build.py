"""The check of a build, and its steps together."""

import pytest

from hvdtrain.errors import HorovodBuildError
from hvdtrain.horovod_build import building
from hvdtrain.horovod_build.building import build_horovod
from hvdtrain.horovod_build.installed import InstalledBuild
from hvdtrain.horovod_build.plan import BuildRequest


def test_the_check_is_not_part_of_an_outer_job(the_plan):
    outer = {
        "HOROVOD_RANK": "3",
        "SLURM_JOB_ID": "1",
        "OMPI_COMM_WORLD_RANK": "0",
        "OMPI_MCA_btl": "tcp",
        "A": "b",
    }
    env = building.check_environment(the_plan, outer)
    assert not {"HOROVOD_RANK", "SLURM_JOB_ID", "OMPI_COMM_WORLD_RANK"} & set(env)
    assert (env["OMPI_MCA_btl"], env["A"]) == ("tcp", "b")
    assert env["PATH"].startswith(str(the_plan.mpi.programs))


@pytest.mark.parametrize(
    ("script", "fault"),
    [
        ("raise OSError('undefined symbol')", "exit code 1"),
        ("import time; time.sleep(60)", "did not end in time"),
    ],
    ids=["fails", "hangs"],
)
def test_a_check_that_does_not_work_is_an_error_with_the_output(the_plan, monkeypatch, script, fault):
    monkeypatch.setattr(building, "_ALL_REDUCE", {"torch": script})
    if fault.startswith("did not end in time"):
        monkeypatch.setattr(building, "CHECK_LIMIT_SECONDS", 1)
    with pytest.raises(HorovodBuildError, match=fault) as error:
        building.check_build(the_plan, lambda line: None)
    assert ("undefined symbol" in error.value.problem) == ("symbol" in script)


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
        self.compiled_into = None
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
    monkeypatch.setattr(building, "default_cache_folder", lambda: cache.folder)
    ours = InstalledBuild("0.28.1", "2.13.0+cpu", "2.21.0", "Open MPI 5", True, False, "e", the_plan.key)

    def compile_wheel(plan, into, jobs, echo):
        steps.ran.append("compile")
        steps.compiled_into = into.folder
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


def test_a_build_is_compiled_installed_and_checked_once(steps, the_plan):
    assert steps.build().key == the_plan.key
    assert steps.ran == ["compile", "install", "check"]
    steps.build()
    assert steps.ran == []


def test_a_cache_that_others_can_write_is_not_used(steps, cache, the_plan, tmp_path):
    steps.build()
    steps.installed = None
    cache.folder.chmod(0o777)
    assert steps.build().key == the_plan.key
    assert steps.ran == ["compile", "install", "check"]
    assert steps.said[1].startswith(f"The cache is not used: {cache.folder} can be written by others")
    assert steps.compiled_into != cache.folder
    assert not steps.compiled_into.exists()


def test_a_wheel_in_the_cache_is_not_built_again(steps):
    steps.build()
    steps.installed = None
    steps.build()
    assert steps.ran == ["install", "check"]


def test_a_failing_check_leaves_nothing_behind(steps, cache, the_plan):
    steps.fails = HorovodBuildError("no all-reduce")
    with pytest.raises(HorovodBuildError, match="no all-reduce"):
        steps.build()
    assert steps.ran == ["compile", "install", "check", "uninstall"]
    assert cache.wheel(the_plan.key) is None
    assert steps.installed is None


def test_an_interrupted_check_keeps_the_wheel_but_not_the_installation(steps, cache, the_plan):
    steps.fails = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        steps.build()
    assert cache.wheel(the_plan.key)
    assert steps.installed is None
