"""How the processes of an examination tell each other what they found."""

import time
from collections.abc import Callable
from typing import Any, Protocol

POLL_SECONDS = 0.01


class Exchange(Protocol):
    """Members that give each other values, step by step; all go through the same steps.

    Attributes:
        index: this member's number.
        size: number of members.
        how: by what means, for people.
        record: what every member said, by step; None where one did not answer in time.
    """

    index: int
    size: int
    how: str
    record: dict[str, list[Any]]

    def share(self, step: str, value: Any, seconds: float) -> list[Any]:
        """Collective. Give what all members said, in their order.

        Members that do not answer in time are not waited for in later steps.

        Args:
            step: the step's name, once in an examination.
            value: what this member says; JSON's types only.
            seconds: how long to wait for the others.
        """

    def time_messages(self, first: int, second: int) -> dict[str, Any] | None:
        """Collective of two members. Time messages by the launcher's own means; None where it has none."""

    def close(self) -> None:
        """Leave; no member waits for another here."""


class Alone:
    """An exchange of one member."""

    index, size, how = 0, 1, "this host alone"

    def __init__(self) -> None:
        self.record: dict[str, list[Any]] = {}

    def share(self, step: str, value: Any, seconds: float) -> list[Any]:
        """Give the own value."""
        self.record[step] = [value]
        return [value]

    def time_messages(self, first: int, second: int) -> None:
        """There is nobody to send to."""

    def close(self) -> None:
        """Do nothing."""


def wait_until(done: Callable[[], bool], seconds: float) -> bool:
    """Look again and again, ever more slowly, whether something is so; tell whether it became so in time."""
    deadline, pause = time.monotonic() + seconds, POLL_SECONDS
    while not done():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.1, 0.1)
    return True
