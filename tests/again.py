"""Run pytest, and the tests that failed once more by themselves, as `.ci/run` does.

    python tests/again.py -m pytest tests/unit -n auto

A test that fails the second time, too, fails. One that passes then is unstable: its name goes to the file of
HVDTRAIN_UNSTABLE, and the exit code is 0. Nothing is run again if more than a few tests failed, if a
process of the tests crashed, or if pytest ended for another reason than failed tests.
"""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FILE = "HVDTRAIN_UNSTABLE"
MOST = 5  # failed tests; more of them are no matter of chance
_FAILED = 1  # pytest's exit code
_CRASHED = b"crashed while running"  # as pytest-xdist says it


def run(words: Sequence[str], cache: Path) -> tuple[int, bool]:
    """Run Python with a cache of pytest's own and show what it prints.

    Returns:
        Its exit code, and whether one of pytest's processes crashed.
    """
    crashed = False
    command = [sys.executable, *words, "-o", f"cache_dir={cache}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while piece := process.stdout.readline():
            crashed = crashed or _CRASHED in piece
            sys.stdout.buffer.write(piece)
            sys.stdout.buffer.flush()
    return process.returncode, crashed


def failed_tests(cache: Path) -> list[str]:
    """Return what failed in the last run with a cache; empty if a file could not be collected."""
    found = cache / "v" / "cache" / "lastfailed"
    names = sorted(json.loads(found.read_text())) if found.exists() else []
    return names if all("::" in name for name in names) else []


def main(words: Sequence[str]) -> int:
    """Run pytest; return its exit code, or 0 if all that failed passed when it was run again."""
    with tempfile.TemporaryDirectory(prefix="hvdtrain-again-") as folder:
        cache = Path(folder)
        code, crashed = run(words, cache)
        names = failed_tests(cache)
        if code != _FAILED or crashed or not 0 < len(names) <= MOST:
            return code
        print(f"== {len(names)} failed; once more, by themselves", flush=True)
        again, crashed = run([*words, "-n", "0", "--last-failed", "--last-failed-no-failures", "none"], cache)
    if again != 0 or crashed:
        return again or code
    if place := os.environ.get(FILE):
        with Path(place).open("a") as file:
            file.writelines(f"{name}\n" for name in names)
    print(f"== unstable, since passed the second time: {', '.join(names)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
