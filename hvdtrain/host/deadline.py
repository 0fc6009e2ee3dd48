"""A time limit for calls that cannot be interrupted, such as collectives."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deadline(seconds: float, on_timeout: Callable[[], None]) -> Iterator[None]:
    """Context manager: call a function, in a thread, if the block does not end in time.

    Args:
        seconds: the time limit.
        on_timeout: called once if the block is still running after this time.
    """
    timer = threading.Timer(seconds, on_timeout)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
