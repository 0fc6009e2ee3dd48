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

    def python(self, version: str = "3.11.7", new_enough: bool = True) -> None:
        self.program(
            "python3",
            f"""case "$*" in
                --version) echo Python {version} ;;
                *version_info*) exit {0 if new_enough else 1} ;;
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

    def check(self) -> tuple[int, str]:
        command = ["/bin/sh", str(SCRIPT), "python3", str(self.folder / ".venv")]
        environ = {"PATH": str(self.programs)}
        result = subprocess.run(
            command, env=environ, capture_output=True, text=True, timeout=300, check=False
        )
        assert result.stdout == ""
        return result.returncode, result.stderr


@pytest.mark.parametrize(
    ("lack", "words"),
    [
        (lambda one: one.python("3.8.10", new_enough=False), ("Python 3.8.10 is too old", "make PYTHON=")),
        (lambda one: (one.programs / "c++").unlink(), ("no C++ compiler", "apt install g++", "CXX=")),
        (lambda one: one.free_kib(2 * GIB), ("2048 MiB are free", "5 GiB are needed", "make VENV=")),
    ],
    ids=["old Python", "no compiler", "full disk"],
)
def test_what_is_missing_is_named_with_how_to_get_it(tmp_path, lack, words):
    machine = Machine(tmp_path)
    assert machine.check() == (0, "")
    lack(machine)
    code, said = machine.check()
    assert code == 1
    assert all(word in said for word in words)
