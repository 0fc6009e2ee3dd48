"""Launching the programs that are compared: each with a time limit, and nothing left running after it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain.errors import EnvironmentFault

_END_SECONDS = 15.0
_POLL_SECONDS = 0.05
_LINES = 15  # of the output, in an error
WORKER = "hvdtrain.bench.worker"


@dataclass(frozen=True)
class Program:
    """A program: one process or more, which all start at once.

    Attributes:
        name: its name in messages.
        commands: the command of each process; of a launcher's one.
        limit_seconds: how long it may take.
        environ: environment variables beside those of this process.
    """

    name: str
    commands: Sequence[Sequence[str]]
    limit_seconds: float
    environ: Mapping[str, str] = field(default_factory=dict)


def horovodrun(workers: int, hosts: str, controller: str | None) -> list[str]:
    """Return the words that launch workers; none for one worker, which needs no launcher.

    Args:
        workers: number of workers.
        hosts: hosts and slots.
        controller: "mpi", "gloo" or None.

    Raises:
        EnvironmentFault: If there is no horovodrun.
    """
    if workers == 1:
        return []
    beside = Path(sys.executable).with_name("horovodrun")
    launcher = str(beside) if beside.is_file() else shutil.which("horovodrun")
    if launcher is None:
        raise EnvironmentFault("there is no horovodrun", "Run: python -m hvdtrain build-horovod")
    return [launcher, *([f"--{controller}"] if controller else []), "-np", str(workers), "-H", hosts]


def worker_command(specification: Path) -> list[str]:
    """Return the command of a worker that does what a file says."""
    return [sys.executable, "-m", WORKER, str(specification)]


@contextmanager
def exchange_folder(shared: bool) -> Iterator[Path]:
    """Return a context with a folder for what programs are told and what they found.

    Args:
        shared: whether other hosts must see it: then it is in the working directory.
    """
    folder = Path(tempfile.mkdtemp(prefix=".hvdtrain-bench-", dir=os.getcwd() if shared else None))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_program(program: Program, found: Path) -> Any:
    """Run a program to its end, and return the JSON that it has written.

    Args:
        program: the program.
        found: the file in which it writes what it found.

    Raises:
        EnvironmentFault: If it fails or takes too long; with the end of its output.
    """
    with ExitStack() as stack:
        output = stack.enter_context(tempfile.TemporaryFile())
        processes = [stack.enter_context(_running(program, command, output)) for command in program.commands]
        code = _wait(processes, program.limit_seconds)
        output.seek(0)
        text = "\n".join(output.read().decode(errors="replace").splitlines()[-_LINES:])
        if code is None:
            raise EnvironmentFault(
                f"{program.name} did not end within {program.limit_seconds:.0f} s and was ended", text
            )
    if code or not found.is_file():
        how = f"with exit code {code}" if code else "without a result"
        raise EnvironmentFault(f"{program.name} ended {how}", text)
    return json.loads(found.read_text(encoding="utf-8"))


@contextmanager
def _running(program: Program, command: Sequence[str], output: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Return a context with a running command; at its end none of its processes that started here is left."""
    process = subprocess.Popen(
        command,
        env={**os.environ, **program.environ},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> int | None:
    """Wait until all processes ended well or one of them did not; return its code, None if time is up."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if failed := [code for code in codes if code]:
            return failed[0]
        if None not in codes:
            return 0
        time.sleep(_POLL_SECONDS)
    return None


def write_specification(path: Path, values: Mapping[str, Any]) -> None:
    """Write what a worker is to do.

    Args:
        path: the file.
        values: what JSON can hold; anything else is written as text.
    """
    path.write_text(json.dumps(values, default=str), encoding="utf-8")
