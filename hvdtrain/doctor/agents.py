"""An examination over ssh: a process on every host, and the head that hands on what they say."""

import contextlib
import json
import os
import queue
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

from hvdtrain.doctor.examination import Member, Request, examine, gather
from hvdtrain.doctor.findings import Finding
from hvdtrain.doctor.machine import is_this_host
from hvdtrain.doctor.ssh import SshOptions, agent_script, why_not
from hvdtrain.errors import EnvironmentFault
from hvdtrain.hosts import HostSlots

_MARK = "hvdtrain-doctor:"  # before each line for the head; login scripts may print lines, too
_FIRST_SECONDS = 30.0  # for logging in, beyond the time for the facts
_END_SECONDS = 3


class PipeExchange:
    """An agent's side: the head is at the other end of its standard input and output."""

    how = "ssh"

    def __init__(self, index: int, size: int, lines_in: IO[str], lines_out: IO[str]) -> None:
        self.index, self.size = index, size
        self.record: dict[str, list[Any]] = {}
        self._in, self._out = lines_in, lines_out

    def share(self, step: str, value: Any, seconds: float) -> list[Any]:
        """Collective. Tell the head, and hear from it what all said."""
        self._say({"step": step, "value": value, "seconds": seconds})
        line = self._in.readline()
        if not line:
            raise EnvironmentFault("the head of the examination is gone")
        values: list[Any] = json.loads(line)
        self.record[step] = values
        return values

    def time_messages(self, first: int, second: int) -> None:
        """Messages do not go through ssh: the hosts' own connections are timed."""

    def close(self) -> None:
        """Tell the head that all is done."""
        self._say({"done": True})

    def _say(self, message: dict[str, Any]) -> None:
        self._out.write(f"{_MARK}{json.dumps(message)}\n")
        self._out.flush()


def run_agent() -> None:
    """Take part in an examination that a head started here over ssh."""
    lines_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the head
    order = json.loads(sys.stdin.readline())
    request = Request.of(order["request"])
    exchange = PipeExchange(order["index"], order["size"], sys.stdin, lines_out)
    examine(exchange, request, gather(request, Member(order["name"], order["slots"], leads=True)))
    exchange.close()


@dataclass
class _Agent:
    host: HostSlots
    process: "subprocess.Popen[bytes]"
    errors: IO[bytes]
    over_ssh: bool
    done: bool = False

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # its end is seen by the reader
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def why_not(self) -> Finding:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_END_SECONDS)
        self.errors.seek(0)
        stderr = self.errors.read().decode(errors="replace")
        return why_not(self.host.name, self.process.poll() or 0, stderr, self.over_ssh)

    def kill(self) -> None:
        """Kill it with all that it started here; over ssh, the other end sees that nobody listens."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    def end(self) -> None:
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(_END_SECONDS if self.done else 0.1)
        except subprocess.TimeoutExpired:
            self.kill()
            self.process.wait()
        self.errors.close()


class Head:
    """The head of an examination over ssh.

    Attributes:
        record: what every host said, by step; None where one did not answer.
        problems: why hosts did not answer, by their place in the list.
    """

    def __init__(self, hosts: list[HostSlots], request: Request, options: SshOptions) -> None:
        self.record: dict[str, list[Any]] = {}
        self.problems: dict[int, Finding] = {}
        self._hosts, self._request, self._options = hosts, request, options
        self._heard: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()

    def run(self) -> None:
        """Examine all hosts at once; nothing runs on any of them afterwards."""
        agents: list[_Agent] = []
        readers = []
        try:
            for index, host in enumerate(self._hosts):
                agents.append(_start(host, self._options))
                order = {"index": index, "size": len(self._hosts), "name": host.name, "slots": host.slots}
                agents[-1].send({**order, "request": self._request.as_dict()})
                readers.append(threading.Thread(target=self._read, args=(index, agents[-1]), daemon=True))
                readers[-1].start()
            self._relay(agents)
        finally:
            for agent in agents:
                agent.end()
            for reader in readers:
                reader.join(1)

    def _read(self, index: int, agent: _Agent) -> None:
        assert agent.process.stdout is not None
        with agent.process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith(_MARK):
                    self._heard.put((index, json.loads(text.removeprefix(_MARK))))
        self._heard.put((index, None))

    def _relay(self, agents: list[_Agent]) -> None:
        """Collect what all say in a step, hand it to all, until all are done."""
        live = set(range(len(agents)))
        seconds = self._request.seconds + _FIRST_SECONDS
        while live:
            step, values = self._one_step(agents, live, seconds)
            if step is None:
                return
            self.record[step] = values
            for index in live:
                agents[index].send(values)

    def _one_step(self, agents: list[_Agent], live: set[int], seconds: float) -> tuple[str | None, list[Any]]:
        """Collect one step; who ends or is too late is struck off ``live``."""
        step: str | None = None
        values: list[Any] = [None] * len(agents)
        waiting, deadline = set(live), time.monotonic() + seconds
        while waiting:
            try:
                index, message = self._heard.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for index in waiting:
                    self.problems[index] = _too_late(agents[index].host.name, step)
                    agents[index].kill()
                live -= waiting
                break
            if index not in live:
                continue
            if message is None or "done" in message:
                waiting.discard(index)
                live.discard(index)
                agents[index].done = message is not None
                if message is None:
                    self.problems[index] = agents[index].why_not()
                continue
            if step is None and "facts" in self.record:
                deadline = time.monotonic() + message["seconds"]
            step = message["step"]
            values[index] = message["value"]
            waiting.discard(index)
        return step, values


def _start(host: HostSlots, options: SshOptions) -> _Agent:
    """Start an agent; on this host without ssh, as horovodrun would start a worker."""
    over_ssh = not is_this_host(host.name)
    script = ["sh", "-c", agent_script()]
    if over_ssh:
        script = [*options.words(host.name), shlex.join(script)]
    errors = tempfile.TemporaryFile()  # noqa: SIM115 - the agent closes it
    try:
        process = subprocess.Popen(
            script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            env={**os.environ, "LC_ALL": "C"}, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise EnvironmentFault(
            "there is no ssh on this host", "Install it: apt install openssh-client"
        ) from None
    return _Agent(host, process, errors, over_ssh)


def _too_late(host: str, step: str | None) -> Finding:
    return Finding(
        host, "doctor", "fail", f"it did not answer in time (step: {step or 'facts'})",
        f"Is it overloaded, or a file system stuck? Try: ssh {host} uptime. --timeout gives it longer.",
    )  # fmt: skip
