"""The check before setting up: what is missing is said at once, with how to get it."""

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "preflight.sh"
GIB = 1024 * 1024


class Machine:
    """A machine whose programs are those of one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.programs = folder / "programs"
        self.programs.mkdir()
        for name in ("awk", "dirname", "sh"):
            (self.programs / name).symlink_to(shutil.which(name))
        self.python()
        self.program("c++", "exit 0")
        self.free_kib(50 * GIB)

    def program(self, name: str, script: str) -> None:
        path = self.programs / name
        path.unlink(missing_ok=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    def python(self, version: str = "3.11.7", new_enough: bool = True, lacks: str = "nothing") -> None:
        """Make a Python whose import of, or search for, what it lacks fails."""
        self.program(
            "python3",
            f"""case "$*" in
                --version) echo Python {version} ;;
                *version_info*) exit {0 if new_enough else 1} ;;
                *{lacks}*) exit 1 ;;
            esac""",
        )

    def free_kib(self, kib: int) -> None:
        """Make a disk with so much free space; only folders that exist are on it."""
        self.program(
            "df",
            f"""[ -d "$2" ] || {{ echo "df: $2: No such file or directory" >&2; exit 1; }}
            echo Filesystem 1024-blocks Used Available Capacity Mounted on
            echo /dev/sda1 99999999 0 {kib} 0% /""",
        )

    def check(self, venv: str | None = None, python: str = "python3", **environ: str) -> tuple[int, str]:
        result = subprocess.run(
            ["/bin/sh", str(SCRIPT), python, venv or str(self.folder / ".venv")],
            env={"PATH": str(self.programs), **environ},
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert result.stdout == ""
        return result.returncode, result.stderr


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def test_a_python_that_is_too_old_is_named_with_its_version(machine):
    machine.python(version="3.8.10", new_enough=False)
    code, said = machine.check()
    assert code == 1
    assert said == (
        "hvdtrain: Python 3.8.10 is too old: 3.11 or newer is needed\n"
        "    Install a newer one beside it and name it: make PYTHON=python3.12 ...\n"
    )


def test_a_missing_compiler_is_named(machine):
    (machine.programs / "c++").unlink()
    code, said = machine.check()
    assert code == 1
    assert said == (
        "hvdtrain: there is no C++ compiler (c++)\n"
        "    apt install g++ (or dnf install gcc-c++); or name yours: CXX=g++-13 make ...\n"
    )


def test_a_full_disk_is_named_with_what_is_free_and_needed(machine):
    machine.free_kib(2 * GIB)
    code, said = machine.check()
    assert code == 1
    assert said == (
        f"hvdtrain: 2048 MiB are free in {machine.folder}; 5 GiB are needed\n"
        "    Free some space, or put it elsewhere: make VENV=/path/to/venv ...\n"
    )
