"""Horovod is missing: the message says so, and what mends it."""

import sysconfig
import venv
from pathlib import Path

import pytest
from support.jobs import launcher, run

SITE = Path(sysconfig.get_path("purelib"))


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


@pytest.mark.parametrize(("framework", "controller"), [("tf", "none"), ("torch", "mpirun")])
def test_a_missing_horovod_is_named_once_with_the_command_that_builds_it(
    python, framework, controller, tmp_path
):
    start = launcher(1 if controller == "none" else 2, controller)
    words = [*start, str(python), "-m", "hvdtrain", "--framework", framework, "--steps", "1"]
    result = run(words, tmp_path)
    assert result.returncode == 3, result.output
    assert result.output.count("Horovod is not installed in this Python environment") == 1, result.output
    assert result.output.count("python -m hvdtrain build-horovod") == 1
    assert "Traceback" not in result.output
