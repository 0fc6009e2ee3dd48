"""A check over ssh: an agent on every host, whose answers a coordinator relays over the agents' streams."""

import json
import os
import queue
import re
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, NamedTuple, cast

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.host.processes import kill_group, start_group
from hvdtrain.tools.doctor.collect import CheckOptions, collect, collect_host_info, is_this_host
from hvdtrain.tools.doctor.report import Finding
from hvdtrain.tools.doctor.transports import Transport

_CONNECT_SECONDS = 5
_LOGIN_SECONDS = 30.0  # in addition to the time for collecting the host's information
_EXIT_SECONDS = 3
_PREFIX = "hvdtrain-doctor:"  # of each line for the coordinator; login scripts may print lines, too
# the variables that decide which Python runs; never the whole environment, which may contain secrets
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_NO_PYTHON, _NO_HVDTRAIN = "hvdtrain-doctor: no python", "No module named hvdtrain"
_FIRST = "host info"  # the first step
_LATE = "Check if it is overloaded, or a file system hangs: ssh {host} uptime. To wait longer: --timeout."
# (what ssh prints, as a pattern, found, remedy); the first one that matches is used
_FAILURES = (
    ("Could not resolve hostname", "the name {host} does not resolve on this host",
     "Correct it in the host file, or add it to DNS, /etc/hosts or ~/.ssh/config."),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key differs from the one known for {host}",
     "If the host was reinstalled: ssh-keygen -R {host}, then log in once by hand and compare the "
     "fingerprint. Otherwise someone may be intercepting the connection."),
    ("Host key verification failed", "its host key is not known here",
     "Log in once by hand and compare the fingerprint (ssh {host}), or add the key to ~/.ssh/known_hosts."),
    ("Permission denied", "it refuses the ssh key (no login without a password)",
     "Run ssh-copy-id {host}; there, ~/.ssh and authorized_keys must be writable by the user alone."),
    ("Connection refused", "it is up, but nothing listens on its ssh port",
     "Start sshd there (systemctl start ssh), or give its port (--ssh-port, or Port in ~/.ssh/config)."),
    ("No route to host", "no route to it: it is down, or in another network",
     "Start it, connect it to the network, or correct its address."),
    ("Network is unreachable", "this host has no route to its network", "Correct the address or the routes."),
    ("timed out", "it does not respond on its ssh port: it is down, or a firewall drops the connection",
     "Start it, or allow ssh through the firewall."),
    ("Connection (closed|reset) by", "sshd closed the connection",
     "See sshd's log there (journalctl -u ssh): the account's shell, a limit, or a ban may be the cause."),
    ("UNPROTECTED PRIVATE KEY FILE", "the private key is readable by others, so ssh does not use it",
     "chmod 600 it."),
)  # fmt: skip


class SshOptions(NamedTuple):
    """How to log in, in addition to ~/.ssh/config: sshd's port and the file of the private key, if given."""

    port: int | None = None
    identity: Path | None = None

    def command(self, host: str) -> list[str]:
        """Return the command that logs in on a host. It never prompts, and it checks host keys."""
        options = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}", "ServerAliveInterval=5"]
        command = ["ssh", *(word for option in options for word in ("-o", option))]
        command += ["-p", str(self.port)] if self.port else []
        command += ["-i", str(self.identity)] if self.identity else []
        return [*command, "-T", host]


def agent_script(environ: Mapping[str, str] = os.environ) -> str:
    """Return a shell script that starts an agent with this Python, in this directory, on any host."""
    python, directory = shlex.quote(sys.executable), shlex.quote(os.getcwd())
    passed_on = " ".join(f"{name}={shlex.quote(environ[name])}" for name in _PASSED_ON if name in environ)
    return (
        f"cd {directory} 2>/dev/null; "
        f"test -x {python} || {{ echo {shlex.quote(_NO_PYTHON)} >&2; exit 90; }}; "
        f"exec env {passed_on} {python} -m hvdtrain doctor --agent"
    )


class PipeTransport(Transport):
    """The agent's side of the transport over ssh: the coordinator is at the other end of two pipes."""

    title = "ssh"

    def __init__(self, index: int, size: int, lines_in: IO[str], lines_out: IO[str]) -> None:
        super().__init__(index, size)
        self._in, self._out = lines_in, lines_out

    def _exchange(self, step: str, value: Any, timeout_seconds: float) -> list[Any]:
        self._send({"step": step, "value": value, "timeout_seconds": timeout_seconds})
        if not (line := self._in.readline()):
            raise EnvironmentFault("the coordinator of the check has ended")
        values: list[Any] = json.loads(line)
        return values

    def close(self) -> None:
        """Report to the coordinator that this agent has finished."""
        self._send({"done": True})

    def _send(self, message: dict[str, Any]) -> None:
        self._out.write(f"{_PREFIX}{json.dumps(message)}\n")
        self._out.flush()


def run_agent() -> None:
    """Collective. Take part in a check whose coordinator has started this process."""
    lines_out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not reach the coordinator
    task = json.loads(sys.stdin.readline())
    options = CheckOptions(**{**task["options"], "frameworks": tuple(task["options"]["frameworks"])})
    transport = PipeTransport(task["index"], task["size"], sys.stdin, lines_out)
    collect(transport, options, collect_host_info(options, task["name"], task["slots"]))
    transport.close()


class _Agent:
    """An agent's process, as its coordinator sees it. On this host it starts without ssh, as workers do."""

    def __init__(self, name: str, ssh: SshOptions) -> None:
        self.name, self.done, self._over_ssh = name, False, not is_this_host(name)
        command = ["sh", "-c", agent_script()]
        if self._over_ssh:
            command = [*ssh.command(name), shlex.join(command)]
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - close() closes it
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self._stderr}
        try:
            self.process = start_group(command, **pipes, env={**os.environ, "LC_ALL": "C"})
            self._in, self.out = cast(IO[bytes], self.process.stdin), cast(IO[bytes], self.process.stdout)
        except FileNotFoundError:
            remedy = "Install it: apt install openssh-client"
            raise EnvironmentFault("there is no ssh on this host", remedy) from None

    def send(self, message: Any) -> None:
        with suppress(OSError):  # the reading thread notices that the agent has ended
            self._in.write(json.dumps(message).encode() + b"\n")
            self._in.flush()

    def explain_failure(self) -> Finding:
        """Return why the agent ended: by what ssh, if it failed, or its script wrote to standard error."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_EXIT_SECONDS)
        self._stderr.seek(0)
        text, name = self._stderr.read().decode(errors="replace"), self.name
        code = self.process.poll() or 0
        last = (text.strip() or "it printed nothing").splitlines()[-1].strip()
        if self._over_ssh and code == 255:
            for printed, found, remedy in _FAILURES:
                if re.search(printed, text):
                    check = "name" if printed.startswith("Could not resolve") else "ssh"
                    return Finding(name, check, "fail", found.format(host=name), remedy.format(host=name))
            remedy = f"Log in by hand to see more: ssh {name}"
            return Finding(name, "ssh", "fail", f"ssh failed: {last[:200]}", remedy)
        if _NO_PYTHON in text:
            remedy = "Install the same environment at the same path on every host."
            return Finding(name, "Python", "fail", f"there is no {sys.executable}", remedy)
        if _NO_HVDTRAIN in text:
            found = f"{sys.executable} has no hvdtrain in {os.getcwd()}"
            remedy = "Install hvdtrain there, in the same environment."
            return Finding(name, "hvdtrain", "fail", found, remedy)
        remedy = f"Run it there to see more: {sys.executable} -m hvdtrain doctor"
        found = f"the agent ended there with exit code {code}: {last[:200]}"
        return Finding(name, "doctor", "fail", found, remedy)

    def close(self) -> None:
        with suppress(OSError):
            self._in.close()
        try:
            self.process.wait(_EXIT_SECONDS if self.done else 0.1)
        except subprocess.TimeoutExpired:  # over ssh, the remote agent then ends because its input is closed
            kill_group(self.process)
        self._stderr.close()


class Coordinator:
    """The process that runs a check over ssh."""

    def __init__(self, hosts: list[HostSlots], options: CheckOptions, ssh: SshOptions) -> None:
        self.answers: dict[str, list[Any]] = {}
        self.problems: dict[int, Finding] = {}
        self._hosts, self._options, self._ssh = hosts, options, ssh
        # (index of an agent, its message; None when its output has ended)
        self._received: queue.Queue[tuple[int, dict[str, Any] | None]] = queue.Queue()

    def run(self) -> None:
        """Check all hosts in parallel. No agent runs on any of them afterwards."""
        with ExitStack() as stack:
            agents: list[_Agent] = []
            for index, host in enumerate(self._hosts):
                agent = _Agent(host.name, self._ssh)
                agents.append(agent)
                stack.callback(agent.close)
                task = {"index": index, "size": len(self._hosts), "name": host.name, "slots": host.slots}
                agent.send({**task, "options": asdict(self._options)})
                threading.Thread(target=self._read, args=(index, agent), daemon=True).start()
            live = set(range(len(agents)))
            while live:
                step, values = self._collect_step(agents, live)
                if step:
                    self.answers[step] = values
                    for index in live:
                        agents[index].send(values)

    def _read(self, index: int, agent: _Agent) -> None:
        with agent.out as lines:
            for line in lines:
                text = line.decode(errors="replace")
                if text.startswith(_PREFIX):
                    self._received.put((index, json.loads(text.removeprefix(_PREFIX))))
        self._received.put((index, None))

    def _collect_step(self, agents: list[_Agent], live: set[int]) -> tuple[str, list[Any]]:
        """Return the name and the answers of the next step."""
        step, values, waiting = "", [None] * len(agents), set(live)
        until = time.monotonic() + self._options.timeout_seconds + _LOGIN_SECONDS
        while waiting:
            try:
                index, message = self._received.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                for index in waiting:
                    name, late = agents[index].name, f"it did not answer in time (step: {step or _FIRST})"
                    self.problems[index] = Finding(name, "doctor", "fail", late, _LATE.format(host=name))
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
            if not step and _FIRST in self.answers:
                until = time.monotonic() + message["timeout_seconds"]
            step, values[index] = message["step"], message["value"]
        return step, values
