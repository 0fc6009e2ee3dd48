"""Standard output and standard error that a job outlives: on a full disk, or when their reader goes away."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import IO, Any, cast


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Context manager: capture standard error, including native code's; print it only after an exception."""
    with tempfile.TemporaryFile() as captured:
        try:
            with _redirected(captured.fileno(), 2):
                yield
        except BaseException:
            captured.seek(0)
            sys.stderr.write(captured.read().decode(errors="replace"))
            raise


@contextmanager
def quiet_output() -> Iterator[None]:
    """Context manager: discard standard output and error, also of native code; exceptions say what fails."""
    with (
        open(os.devnull, "w") as nowhere,
        _redirected(nowhere.fileno(), 1, 2),
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


@contextmanager
def _redirected(target: int, *descriptors: int) -> Iterator[None]:
    """Context manager: let files of this process, and of native code in it, be another one."""
    kept = []
    for descriptor in descriptors:
        (sys.stdout if descriptor == 1 else sys.stderr).flush()
        kept.append(os.dup(descriptor))
        os.dup2(target, descriptor)
    try:
        yield
    finally:
        for descriptor, original in zip(descriptors, kept, strict=True):
            (sys.stdout if descriptor == 1 else sys.stderr).flush()
            os.dup2(original, descriptor)
            os.close(original)


class TolerantFile:
    """A text file whose errors do not end the job: text that cannot be written is dropped."""

    def __init__(self, file: IO[str], name: str) -> None:
        self._file = file
        self._name = name
        self._is_noted = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """Write text, if that is possible."""
        try:
            try:
                self._file.write(text)
            except UnicodeEncodeError:
                encoding = getattr(self._file, "encoding", None) or "ascii"
                self._file.write(text.encode(encoding, "replace").decode(encoding))
        except (OSError, ValueError) as error:  # ValueError: the file is closed
            self._note(error)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write lines, if that is possible."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Write what is buffered, if that is possible."""
        try:
            self._file.flush()
        except (OSError, ValueError) as error:
            self._note(error)

    def _note(self, error: OSError | ValueError) -> None:
        """Say once that text is lost. If a reader went away, all later output goes nowhere."""
        if isinstance(error, BrokenPipeError):
            with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
                os.dup2(nowhere.fileno(), self._file.fileno())
        if self._is_noted:
            return
        self._is_noted = True
        reason = getattr(error, "strerror", None) or error
        if self._name != "standard error":
            with suppress(OSError, ValueError, AttributeError):
                sys.stderr.write(
                    f"note: cannot write to {self._name}: {reason}; the job continues, and its files have "
                    "what is not shown\n"
                )
                sys.stderr.flush()


def tolerant(file: IO[str], name: str = "standard output") -> IO[str]:
    """Return a file that drops what cannot be written to another one."""
    return file if isinstance(file, TolerantFile) else cast(IO[str], TolerantFile(file, name))


def open_closed_files() -> None:
    """Open the null device in place of a standard file that is closed, as old daemons close all of them."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def make_output_tolerant() -> None:
    """Let neither standard output nor standard error end this process, also if they are closed."""
    open_closed_files()
    sys.stdout = tolerant(sys.stdout)
    sys.stderr = tolerant(sys.stderr, "standard error")
