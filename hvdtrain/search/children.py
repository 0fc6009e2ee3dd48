"""Jobs that run beside the search which started them, and end with it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from hvdtrain.bench.launch import code_of
from hvdtrain.host.side_process import end_with_parent

_END_SECONDS = 60.0  # a job that saves its state before it ends needs some
_POLL_SECONDS = 0.05
_LINES, _BYTES = 15, 2**14  # of a log's end


def python_command(module: str) -> list[str]:
    """Return the words that run a module in this Python."""
    return [sys.executable, "-m", module]


class Child:
    """A job: a process that the kernel asks to end when this one ends, however it does.

    It is started in the main thread, since the kernel asks when the thread ends that started it.

    Args:
        command: its command.
        log: the file to which its output is appended.
        environ: environment variables beside those of this process.
    """

    def __init__(self, command: Sequence[str], log: Path, environ: Mapping[str, str]) -> None:
        self.log = log
        end_with_this = partial(end_with_parent, os.getpid())
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=end_with_this,  # noqa: PLW1509 - this process has no other thread now
            )

    def code(self) -> int | None:
        """Return its exit code, negative for a signal; None while it runs."""
        return code_of(self._process)

    def ask_to_end(self) -> None:
        """Ask it to save its state and end."""
        if self.code() is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGTERM)

    def close(self) -> None:
        """Kill what is left of it, and let the system forget it."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def last_lines(self) -> str:
        """Return the end of its output."""
        with suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _BYTES))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-_LINES:])
        return ""


def end_children(children: Sequence[Child]) -> None:
    """Ask jobs to end, wait for them for a minute, and kill what is left of them."""
    for child in children:
        child.ask_to_end()
    until = time.monotonic() + _END_SECONDS
    try:
        while any(child.code() is None for child in children) and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
    finally:
        for child in children:
            child.close()
