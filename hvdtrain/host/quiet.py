"""Keeping native libraries' start-up notices off the terminal."""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout


@contextmanager
def quiet_stderr() -> Iterator[None]:
    """Hold back what is written to standard error, native code included; show it only on an exception."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as held:
        os.dup2(held.fileno(), 2)
        try:
            yield
        except BaseException:
            os.dup2(kept, 2)
            held.seek(0)
            sys.stderr.write(held.read().decode(errors="replace"))
            raise
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


@contextmanager
def quiet_output() -> Iterator[None]:
    """Drop what is written to standard output and error, native code included, whatever happens.

    For libraries that chatter as they work; what goes wrong in them is told by their exceptions.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    kept = os.dup(1), os.dup(2)
    with open(os.devnull, "w") as nowhere:
        for descriptor in (1, 2):
            os.dup2(nowhere.fileno(), descriptor)
        try:
            with redirect_stdout(nowhere), redirect_stderr(nowhere):
                yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for descriptor, original in zip((1, 2), kept, strict=True):
                os.dup2(original, descriptor)
                os.close(original)
