"""Processes that this one starts: what they inherit, their limits, and how they end with it or are killed."""

import ctypes
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

import psutil


@contextmanager
def deadline(seconds: float, on_timeout: Callable[[], None]) -> Iterator[None]:
    """Context manager: call a function, in a thread, if the block does not end in time."""
    timer = threading.Timer(seconds, on_timeout)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


# the signals that a worker handles: what it starts ignores them
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
SAME_START_SECONDS = 2.0  # two processes read the time of boot, of which a start time is made, differently
_KILLED_SECONDS = 1.0  # a process that waits for a disk ends when that answers
_POLL_SECONDS = 0.05  # between two looks at how much a command has written
_MOST_BYTES = 1 << 20
_PR_SET_PDEATHSIG = 1


def end_with_parent(parent: int | None, number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the thread ends that started it."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if parent is not None and os.getppid() != parent:
        os._exit(1)


class Ended(NamedTuple):
    """How a command ended."""

    code: int | None  # its exit code, negative for a signal; None if it was killed at its time limit
    output: str  # what it wrote to standard output, at most 1 MiB
    errors: str  # the last 1 MiB of what it wrote to standard error
    is_cut: bool  # whether it was killed because it wrote more than 1 MiB to standard output


def run_limited(command: Sequence[str], seconds: float, environ: Mapping[str, str] | None = None) -> Ended:
    """Run a command without input. At its end, or at the limit, all of its process group are killed."""
    until = time.monotonic() + seconds
    with _memory_file() as output, _memory_file() as errors:  # no disk that may be full
        process = start_group(command, stdout=output, stderr=errors, env=environ)
        try:
            while (is_late := process.poll() is None) and time.monotonic() < until and not _is_full(output):
                with suppress(subprocess.TimeoutExpired):
                    process.wait(_POLL_SECONDS)
        finally:
            kill_group(process)
        is_cut = _is_full(output)
        output.seek(0)
        errors.seek(max(0, os.fstat(errors.fileno()).st_size - _MOST_BYTES))
        said, of_errors = (file.read(_MOST_BYTES).decode(errors="replace") for file in (output, errors))
    return Ended(None if is_late and not is_cut else process.returncode, said, of_errors, is_cut)


def _memory_file() -> IO[bytes]:
    return os.fdopen(os.memfd_create("hvdtrain", os.MFD_CLOEXEC), "w+b")


def _is_full(output: IO[bytes]) -> bool:
    return os.fstat(output.fileno()).st_size > _MOST_BYTES


def start_group(command: Sequence[str], **options: Any) -> "subprocess.Popen[Any]":
    """Start a command that Ctrl-C does not reach, in a process group of its own and without input."""
    return subprocess.Popen(command, **{"stdin": subprocess.DEVNULL, **options}, start_new_session=True)


def kill_group(process: "subprocess.Popen[bytes]", seconds: float = _KILLED_SECONDS) -> None:
    """Kill a process and what is left of the group that it leads; wait some seconds for its end."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(seconds)


def kill_if_same(pid: int, process_seconds: float) -> bool:
    """Kill a process of this host, unless it is this one or its number is another process's now."""
    with suppress(psutil.Error, OSError):
        process = psutil.Process(pid)
        if pid != os.getpid() and abs(process.create_time() - process_seconds) < SAME_START_SECONDS:
            process.kill()
            return True
    return False
