"""How the agents of the doctor exchange their answers."""

import time
from collections.abc import Callable
from typing import Any, Protocol

POLL_SECONDS = 0.01


class Transport(Protocol):
    """Exchange of values between agents, step by step. All agents go through the same steps.

    Attributes:
        index: the number of this agent, from 0.
        size: the number of agents.
        title: a short name of the transport that is shown to the user.
        answers: for each step, one answer per agent; None for an agent that did not answer in time.
    """

    index: int
    size: int
    title: str
    answers: dict[str, list[Any]]

    def allgather(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Collective. Return the values of all agents, in the order of their indices.

        The value of an agent that does not answer in time is None. Later steps do not wait for this agent.

        Args:
            step: name of the step; every step has another one.
            value: the value of this agent, in JSON's types.
            timeout_seconds: how long to wait for the other agents.
        """

    def time_messages(self, first: int, second: int) -> dict[str, Any] | None:
        """Collective, for two agents. Time messages over this transport; None if it does not support that."""

    def close(self) -> None:
        """Leave the transport, without waiting for other agents."""


class LocalTransport:
    """The transport of a single agent."""

    index, size, title = 0, 1, "this host alone"

    def __init__(self) -> None:
        self.answers: dict[str, list[Any]] = {}

    def allgather(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Return a list with the given value only."""
        self.answers[step] = [value]
        return [value]

    def time_messages(self, first: int, second: int) -> None:
        """Return None: there is no other agent."""

    def close(self) -> None:
        """Do nothing."""


def wait_until(condition: Callable[[], bool], timeout_seconds: float) -> bool:
    """Poll a condition, at growing intervals; return whether it became true in time."""
    deadline, pause = time.monotonic() + timeout_seconds, POLL_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(pause * 1.1, 0.1)
    return True
