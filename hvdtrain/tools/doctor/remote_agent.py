"""The agent that the coordinator starts on a host over ssh; the two communicate over its standard streams."""

import json
import os
import sys
from typing import IO, Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.tools.doctor.collect import Agent, CheckOptions, collect, collect_host_info

PREFIX = "hvdtrain-doctor:"  # of each line for the coordinator; login scripts may print lines, too


class PipeTransport:
    """The agent's side of the transport over ssh: the coordinator is at the other end of two pipes."""

    title = "ssh"

    def __init__(self, index: int, size: int, lines_in: IO[str], lines_out: IO[str]) -> None:
        self.index, self.size = index, size
        self.answers: dict[str, list[Any]] = {}
        self._in, self._out = lines_in, lines_out

    def allgather(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        """Collective. Send the value to the coordinator; return the values of all agents.

        Raises:
            EnvironmentFault: If the coordinator has ended.
        """
        self._send({"step": step, "value": value, "timeout_seconds": timeout_seconds})
        line = self._in.readline()
        if not line:
            raise EnvironmentFault("the coordinator of the check has ended")
        values: list[Any] = json.loads(line)
        self.answers[step] = values
        return values

    def time_messages(self, first: int, second: int) -> None:
        """Return None: ssh is not what a job sends messages over, so TCP connections are timed."""

    def close(self) -> None:
        """Tell the coordinator that this agent has finished."""
        self._send({"done": True})

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(f"{PREFIX}{json.dumps(message)}\n")
        self._out.flush()


def run_agent() -> None:
    """Collective. Take part in a check whose coordinator has started this process over ssh."""
    lines_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not reach the coordinator
    task = json.loads(sys.stdin.readline())
    options = CheckOptions.from_dict(task["options"])
    transport = PipeTransport(task["index"], task["size"], sys.stdin, lines_out)
    agent = Agent(task["name"], task["slots"], is_leader=True)
    collect(transport, options, collect_host_info(options, agent))
    transport.close()
