"""What this worker's training thread is doing, for whoever watches it from another thread.

One process has one training thread, so there is one activity. Changing it takes well under a microsecond.
"""

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Activity:
    """What the training thread is doing.

    Attributes:
        name: the activity in words that follow "rank 1 is", such as "reading data" or "in training step 12".
        since_seconds: when it began, by ``time.monotonic()``.
        is_long: whether it was announced to take long, such as a save: then it is not a stall.
        number: the number of changes of the activity before this one.
    """

    name: str
    since_seconds: float
    is_long: bool = False
    number: int = 0


class ActivityMark:
    """The current activity of the training thread. Only that thread changes it; any thread reads it."""

    def __init__(self) -> None:
        self.current = Activity("starting", time.monotonic(), is_long=True)
        self.thread_id = threading.main_thread().ident

    def enter(self, name: str, is_long: bool = False) -> None:
        """Begin an activity, which lasts until the next one begins."""
        self.thread_id = threading.get_ident()
        self.current = Activity(name, time.monotonic(), is_long, self.current.number + 1)

    @contextmanager
    def during(self, name: str, is_long: bool = True) -> Iterator[None]:
        """Return a context in which an activity lasts; afterwards the one before it begins again."""
        before = self.current
        self.enter(name, is_long)
        try:
            yield
        finally:
            self.enter(before.name, before.is_long)


ACTIVITY = ActivityMark()
