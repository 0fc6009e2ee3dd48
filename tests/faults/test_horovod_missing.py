"""Horovod is missing, partial or built for something else: the message says which, and what mends it."""

import os
import sysconfig
import venv
from pathlib import Path

import pytest
from support.jobs import Result, run

SITE = Path(sysconfig.get_path("purelib"))
COMMAND = "python -m hvdtrain build-horovod"


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A virtual environment with links to all packages of this one but Horovod."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    venv.create(folder, symlinks=True)
    (site,) = folder.glob("lib/python*/site-packages")
    for package in SITE.iterdir():
        if not package.name.startswith("horovod") and not (site / package.name).exists():
            (site / package.name).symlink_to(package)
    return folder / "bin" / "python"


@pytest.fixture
def horovod(python):
    """A copy of the installed Horovod in that environment, to be spoilt: its files are links."""
    (site,) = python.parents[1].glob("lib/python*/site-packages")
    made = []
    for package in SITE.glob("horovod*"):
        for source in [p for p in package.rglob("*") if p.is_file()]:
            target = site / source.relative_to(SITE)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.symlink_to(source)
            made.append(target)
    yield site / "horovod"
    for path in made:
        path.unlink(missing_ok=True)
    for package in SITE.glob("horovod*"):
        for parent, folders, _ in os.walk(site / package.name, topdown=False):
            for name in folders:
                (Path(parent) / name).rmdir()
        (site / package.name).rmdir()


def train(python: Path, framework: str, cwd: Path, *launcher: str) -> Result:
    command = [*launcher, str(python), "-m", "hvdtrain", "--framework", framework, "--steps", "1"]
    return run(command, cwd)


def check(result: Result, said: str) -> None:
    assert result.returncode == 3, result.output
    assert result.output.count(said) == 1, result.output
    assert result.output.count(COMMAND) == 1
    assert "Traceback" not in result.output


@pytest.mark.parametrize("framework", ["torch", "tf"])
def test_a_missing_horovod_is_named_with_the_command_that_builds_it(python, framework, tmp_path):
    check(train(python, framework, tmp_path), "Horovod is not installed in this Python environment")


def test_two_workers_say_it_once(python, tmp_path):
    result = train(python, "torch", tmp_path, "mpirun", "-np", "2", "--bind-to", "none", "--oversubscribe")
    check(result, "Horovod is not installed in this Python environment")
