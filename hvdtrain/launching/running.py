"""Running a launcher as a child: its output is shown, Ctrl-C ends it, and it does not outlive its parent."""

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress

from hvdtrain.host.processes import start_group

_POLL_SECONDS = 0.2
_LATE_OUTPUT_SECONDS = 1.0  # of processes that outlive the launcher
_INTERRUPT_SECONDS = 15.0  # from Ctrl-C until the launcher is ended
_GRACE_VARIABLE, _GRACE_SECONDS = "HOROVOD_GRACEFUL_TERMINATION_SECONDS", 30.0  # horovodrun's, for workers
_END_SECONDS = 10.0  # that horovodrun has beyond it
_BYTES = 1 << 16


def run_command(command: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run a launcher to its end, and show the output of its workers where this process writes.

    Args:
        command: the launcher with its arguments.
        environ: its environment.

    Returns:
        Its exit code; 128 + n if signal n ended it.

    Raises:
        KeyboardInterrupt: If Ctrl-C came; the workers have ended.
    """
    starter = [sys.executable, "-m", "hvdtrain.launching.starter", str(os.getpid())]
    # Ctrl-C goes through this process
    process = start_group([*starter, *command], env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    with _ended(process):
        try:
            _show_output(process)
        except KeyboardInterrupt:
            _interrupt(process)
            raise
        code = process.wait()
    return code if code >= 0 else 128 - code


@contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Return a context at whose end the launcher has ended: asked to, or killed."""
    try:
        yield
    finally:
        assert process.stdout is not None
        try:
            for number in (signal.SIGTERM, signal.SIGKILL):
                if process.poll() is None:
                    process.send_signal(number)
                    _show_output(process, _end_seconds())  # a worker that writes into a full pipe would wait
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(_LATE_OUTPUT_SECONDS)
        except BaseException:  # asked again
            process.kill()
            raise
        finally:
            process.stdout.close()


def _end_seconds() -> float:
    """Return how long a launcher that was asked to end may take."""
    with suppress(ValueError):  # which it refuses itself
        return float(os.environ.get(_GRACE_VARIABLE) or _GRACE_SECONDS) + _END_SECONDS
    return _GRACE_SECONDS + _END_SECONDS


def _interrupt(process: subprocess.Popen[bytes]) -> None:
    """Pass Ctrl-C on, and show what the workers still say; another Ctrl-C ends the wait."""
    with suppress(KeyboardInterrupt):
        process.send_signal(signal.SIGINT)
        _show_output(process, _INTERRUPT_SECONDS)
        return
    process.kill()


def _show_output(process: subprocess.Popen[bytes], limit_seconds: float | None = None) -> None:
    """Show what a process writes until it ends, or until the time is over."""
    assert process.stdout is not None
    descriptor, rest = process.stdout.fileno(), b""
    until = None if limit_seconds is None else time.monotonic() + limit_seconds
    ended: float | None = None
    while until is None or time.monotonic() < until:
        if select.select([descriptor], [], [], _POLL_SECONDS)[0]:
            data = os.read(descriptor, _BYTES)
            if not data:
                break
            *lines, rest = (rest + data).split(b"\n")
            _show(b"".join(line + b"\n" for line in lines))
        elif process.poll() is not None:
            ended = ended or time.monotonic()
            if time.monotonic() - ended > _LATE_OUTPUT_SECONDS:
                break
    _show(rest)


def _show(text: bytes) -> None:
    if text:
        with suppress(OSError, ValueError):
            encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
            sys.stdout.write(text.decode(errors="replace").encode(encoding, "replace").decode(encoding))
            sys.stdout.flush()
