"""The compilation around the compiler: environment, progress, errors, processes."""

import dataclasses
import os
from pathlib import Path

import psutil
import pytest

from hvdtrain.horovod_build import building as compiling
from hvdtrain.horovod_build.toolchain import Gpu


def test_the_users_own_variables_do_not_reach_the_build(the_plan, tmp_path, monkeypatch):
    others = ("HOROVOD_WITH_MXNET", "HOROVOD_CPU_OPERATIONS", "CMAKE_BUILD_TYPE", "CCL_ROOT", "MAKELEVEL")
    for name in others:
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("MAKEFLAGS", "w -- jobserver")
    env = compiling.build_environment(the_plan, tmp_path, jobs=3)
    assert not {*others} & {*env}
    assert env["MAKEFLAGS"] == "-j3"
    assert env["HVDTRAIN_RPATH"] == "$ORIGIN/../../../.."
    assert [env[f"HOROVOD_WITH_{name}"] for name in ("MPI", "PYTORCH", "TENSORFLOW")] == ["1"] * 3


def test_gpu_libraries_get_the_names_that_cmake_looks_for(the_plan, tmp_path):
    runtime = tmp_path / "cuda" / "lib" / "libcudart.so.13"
    runtime.parent.mkdir(parents=True)
    runtime.touch()
    gpu = Gpu(tmp_path / "cuda", "13.0", Path("/nccl/include"), Path("/nccl/lib/libnccl.so.2"), "2.28.9")
    env = compiling.build_environment(dataclasses.replace(the_plan, gpu=gpu), tmp_path, jobs=1)
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
        return compiling.run_logged([str(path)], tmp_path / "log", dict(os.environ), tmp_path, echo)

    return run


def test_a_command_that_takes_too_long_ends_with_everything_it_started(run, monkeypatch, tmp_path):
    monkeypatch.setattr(compiling, "COMPILE_LIMIT_SECONDS", 1)
    lines = run("sh -c 'trap \"\" TERM; echo $$; sleep 60; sleep 60' & wait")
    assert ended(int(lines[0]))
    error = compiling._compile_error(lines, tmp_path / "log")
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
