"""A time limit for what cannot be given up from inside, such as a collective."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def deadline(seconds: float, give_up: Callable[[], None]) -> Iterator[None]:
    """Context that calls ``give_up``, in a thread, where it is not left in time."""
    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
