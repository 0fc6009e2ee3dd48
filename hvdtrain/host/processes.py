"""Processes that this one starts: what they inherit, their limits, and how they end with it or are killed."""

import ctypes
import os
import selectors
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

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
_LEFTOVER_SECONDS = 0.5  # for what processes still write that the command left behind
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
    until, ended_at = time.monotonic() + seconds, None
    output, errors = bytearray(), bytearray()
    with selectors.DefaultSelector() as selector:
        process = start_group(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ)
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            selector.register(process.stdout, selectors.EVENT_READ, output)
            selector.register(process.stderr, selectors.EVENT_READ, errors)
            while len(output) <= _MOST_BYTES and (selector.get_map() or ended_at is None):
                for key, _ in selector.select(0.05 if selector.get_map() else 0.01):
                    if data := os.read(key.fd, 1 << 16):
                        key.data.extend(data)
                        del errors[:-_MOST_BYTES]
                    else:
                        selector.unregister(key.fd)
                now = time.monotonic()
                if ended_at is None and process.poll() is not None:
                    ended_at = now
                if now > (until if ended_at is None else ended_at + _LEFTOVER_SECONDS):
                    break
            is_late = process.poll() is None and len(output) <= _MOST_BYTES
        finally:
            kill_group(process)
            process.stdout.close()
            process.stderr.close()
    code = None if is_late else process.returncode
    output_text, errors_text = output.decode(errors="replace"), errors.decode(errors="replace")
    return Ended(code, output_text, errors_text, is_cut=len(output) > _MOST_BYTES)


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
