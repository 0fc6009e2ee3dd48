"""A check over ssh: start an agent on every host, and relay the agents' answers between them."""

import contextlib
import json
import os
import queue
import shlex
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass
from typing import IO, Any

from hvdtrain.doctor.ssh import SshOptions, agent_script, explain_failure
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.host.processes import kill_group, start_group
from hvdtrain.tools.doctor.collect import CheckOptions
from hvdtrain.tools.doctor.machine import is_this_host
from hvdtrain.tools.doctor.remote_agent import PREFIX
from hvdtrain.tools.doctor.report import Finding

_LOGIN_SECONDS = 30.0  # in addition to the time for collecting the host's information
_EXIT_SECONDS = 3


@dataclass
class _AgentProcess:
    host: HostSlots
    process: "subprocess.Popen[bytes]"
    stderr: IO[bytes]
    over_ssh: bool
    done: bool = False

    def send(self, message: Any) -> None:
        with contextlib.suppress(OSError):  # the reading thread notices that the agent has ended
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(message).encode() + b"\n")
            self.process.stdin.flush()

    def explain_failure(self) -> Finding:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_SECONDS)
        self.stderr.seek(0)
        text = self.stderr.read().decode(errors="replace")
        return explain_failure(self.host.name, self.process.poll() or 0, text, self.over_ssh)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(_EXIT_SECONDS if self.done else 0.1)
        except subprocess.TimeoutExpired:  # over ssh, the remote agent then ends because its input is closed
            kill_group(self.process)
        self.stderr.close()


class Coordinator:
    """The process that runs a check over ssh.

    Attributes:
        answers: for each step, one answer per host; None for a host that did not answer.
        problems: why hosts did not answer, by their index in the list of hosts.
    """

    def __init__(self, hosts: list[HostSlots], options: CheckOptions, ssh: SshOptions) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.problems: dict[int, Finding] = {}
        self._hosts, self._options, self._ssh = hosts, options, ssh
        # (index of an agent, its message; None when its output has ended)
        self._received: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()

    def run(self) -> None:
        """Check all hosts in parallel. No agent runs on any of them afterwards."""
        agents: list[_AgentProcess] = []
        readers = []
        try:
            for index, host in enumerate(self._hosts):
                agents.append(_start_agent(host, self._ssh))
                task = {"index": index, "size": len(self._hosts), "name": host.name, "slots": host.slots}
                agents[-1].send({**task, "options": self._options.to_dict()})
                readers.append(threading.Thread(target=self._read, args=(index, agents[-1]), daemon=True))
                readers[-1].start()
            self._relay(agents)
        finally:
            for agent in agents:
                agent.close()
            for reader in readers:
                reader.join(1)

    def _read(self, index: int, agent: _AgentProcess) -> None:
        assert agent.process.stdout is not None
        with agent.process.stdout as lines:
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith(PREFIX):
                    self._received.put((index, json.loads(text.removeprefix(PREFIX))))
        self._received.put((index, None))

    def _relay(self, agents: list[_AgentProcess]) -> None:
        """Collect the answers of each step and send them to all agents, until all agents have ended."""
        live = set(range(len(agents)))
        while live:
            step, values = self._collect_step(agents, live)
            if step is None:
                return
            self.answers[step] = values
            for index in live:
                agents[index].send(values)

    def _collect_step(self, agents: list[_AgentProcess], live: set[int]) -> tuple[str | None, list[Any]]:
        """Return the name and the answers of the next step.

        Agents that have ended, or do not answer in time, are removed from ``live``.
        """
        step: str | None = None
        values: list[Any] = [None] * len(agents)
        waiting = set(live)
        deadline = time.monotonic() + self._options.timeout_seconds + _LOGIN_SECONDS
        while waiting:
            try:
                index, message = self._received.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                for index in waiting:
                    self.problems[index] = _timed_out(agents[index].host.name, step)
                    kill_group(agents[index].process)
                live -= waiting
                break
            if index not in live:
                continue
            waiting.discard(index)
            if message is None or "done" in message:
                live.discard(index)
                agents[index].done = message is not None
                if message is None:
                    self.problems[index] = agents[index].explain_failure()
                continue
            if step is None and "host info" in self.answers:
                deadline = time.monotonic() + message["timeout_seconds"]
            step = message["step"]
            values[index] = message["value"]
        return step, values


def _start_agent(host: HostSlots, ssh: SshOptions) -> _AgentProcess:
    """Start an agent; on this host without ssh, as horovodrun starts its workers."""
    over_ssh = not is_this_host(host.name)
    command = ["sh", "-c", agent_script()]
    if over_ssh:
        command = [*ssh.command(host.name), shlex.join(command)]
    stderr = tempfile.TemporaryFile()  # noqa: SIM115 - _AgentProcess closes it
    try:
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": stderr}
        process = start_group(command, **pipes, env={**os.environ, "LC_ALL": "C"})
    except FileNotFoundError:
        raise EnvironmentFault(
            "there is no ssh on this host", "Install it: apt install openssh-client"
        ) from None
    return _AgentProcess(host, process, stderr, over_ssh)


def _timed_out(host: str, step: str | None) -> Finding:
    return Finding(
        host, "doctor", "fail", f"it did not answer in time (step: {step or 'host info'})",
        f"Check if it is overloaded, or a file system hangs: ssh {host} uptime. To wait longer: --timeout.",
    )  # fmt: skip
