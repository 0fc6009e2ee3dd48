"""A check over ssh: start an agent on every host, and relay the agents' answers between them."""

import contextlib
import json
import os
import queue
import shlex
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from hvdtrain.elastic.driver.hosts import ScriptHosts
from hvdtrain.errors import DiscoveryError, EnvironmentFault
from hvdtrain.host.hostfile import HostSlots
from hvdtrain.host.processes import kill_group, start_group
from hvdtrain.tools.doctor.collect import CheckOptions
from hvdtrain.tools.doctor.machine import is_this_host
from hvdtrain.tools.doctor.remote_agent import PREFIX
from hvdtrain.tools.doctor.report import Finding

_CONNECT_SECONDS = 5
# the variables that decide which Python runs; never the whole environment, which may contain secrets
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_NO_PYTHON, _NO_HVDTRAIN = "hvdtrain-doctor: no python", "No module named hvdtrain"
# (what ssh prints, found, remedy); the first one that matches is used
_FAILURES = (
    ("Could not resolve hostname", "the name {host} does not resolve on this host",
     "Correct it in the host file, or add it to DNS, /etc/hosts or ~/.ssh/config."),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key differs from the one known for {host}",
     "If the host was reinstalled: ssh-keygen -R {host}, then log in once by hand and compare the "
     "fingerprint. Otherwise someone may be intercepting the connection."),
    ("Host key verification failed", "its host key is not known here",
     "Log in once by hand and compare the fingerprint ({ssh}), or add the key to ~/.ssh/known_hosts."),
    ("Permission denied", "it refuses the ssh key (no login without a password)",
     "Run ssh-copy-id {host}; there, ~/.ssh and authorized_keys must be writable by the user alone."),
    ("Connection refused", "it is up, but nothing listens on its ssh port",
     "Start sshd there (systemctl start ssh), or give its port (--ssh-port, or Port in ~/.ssh/config)."),
    ("No route to host", "no route to it: it is down, or in another network",
     "Start it, connect it to the network, or correct its address."),
    ("Network is unreachable", "this host has no route to its network", "Correct the address or the routes."),
    ("timed out", "it does not respond on its ssh port: it is down, or a firewall drops the connection",
     "Start it, or allow ssh through the firewall."),
    ("Connection closed by", "sshd closed the connection",
     "See sshd's log there (journalctl -u ssh): the account's shell, a limit, or a ban may be the cause."),
    ("Connection reset by", "sshd closed the connection",
     "See sshd's log there (journalctl -u ssh): the account's shell, a limit, or a ban may be the cause."),
    ("UNPROTECTED PRIVATE KEY FILE", "the private key is readable by others, so ssh does not use it",
     "chmod 600 it."),
)  # fmt: skip


@dataclass(frozen=True)
class SshOptions:
    """How to log in, in addition to ~/.ssh/config.

    Attributes:
        port: of sshd; None for ssh's default.
        identity: file of the private key; None for ssh's default.
    """

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


def explain_failure(host: str, code: int, stderr: str, over_ssh: bool) -> Finding:
    """Return a finding that explains why the agent on a host failed.

    Args:
        host: the name of the host.
        code: the exit code of ssh, which is that of the script unless it is 255.
        stderr: what ssh and the script wrote to standard error.
        over_ssh: whether the agent was started over ssh.
    """
    if over_ssh and code == 255:
        for text, found, remedy in _FAILURES:
            if text in stderr:
                names = {"host": host, "ssh": f"ssh {host}"}
                check = "name" if text.startswith("Could not resolve") else "ssh"
                return Finding(host, check, "fail", found.format(**names), remedy.format(**names))
        return Finding(
            host,
            "ssh",
            "fail",
            f"ssh failed: {_last_line(stderr)}",
            f"Log in by hand to see more: ssh {host}",
        )
    if _NO_PYTHON in stderr:
        return Finding(
            host, "Python", "fail", f"there is no {sys.executable}",
            "Install the same environment at the same path on every host.",
        )  # fmt: skip
    if _NO_HVDTRAIN in stderr:
        return Finding(
            host, "hvdtrain", "fail", f"{sys.executable} has no hvdtrain in {os.getcwd()}",
            "Install hvdtrain there, in the same environment.",
        )  # fmt: skip
    return Finding(
        host, "doctor", "fail", f"the agent ended there with exit code {code}: {_last_line(stderr)}",
        f"Run it there to see more: {sys.executable} -m hvdtrain doctor",
    )  # fmt: skip


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it printed nothing"


_CHECK = "host discovery"
_RUNS = 3
_SLOW_SECONDS = 2.0


def check_discovery(script: str, slots_per_host: int) -> tuple[list[HostSlots], list[Finding]]:
    """Run a discovery script some times, as an elastic job does once a second.

    Args:
        script: the script, a command of the shell.
        slots_per_host: slots of a host for which it prints no number.

    Returns:
        The hosts of the last run, and findings, which are listed with the first host.

    Raises:
        DiscoveryError: If a run fails, or there is no host to check.
    """
    notes: list[str] = []
    discovery = ScriptHosts(script, slots_per_host, note=notes.append)
    answers, slowest = [], 0.0
    for _ in range(_RUNS):
        since = time.monotonic()
        answers.append(discovery.find())
        slowest = max(slowest, time.monotonic() - since)
    hosts = answers[-1]
    if not hosts:
        raise DiscoveryError(
            f"host discovery script {script}: it names no host",
            "An elastic job waits for hosts. Start at least one, then run the doctor again.",
        )
    problems = [*((note, "Print each host once, with all its slots.") for note in notes)]
    if slowest > _SLOW_SECONDS:
        problems.append(
            (
                f"a run took {slowest:.1f} s",
                "It runs once a second: let it read what another process collects.",
            )
        )
    if any(sorted(one) == sorted(hosts) and one != hosts for one in answers):
        problems.append(("it prints the hosts in varying order", "Sort them: | sort"))
    elif any(one != hosts for one in answers):
        problems.append(
            (
                "its runs name different hosts",
                "Workers leave a host that is not named. Print those that stay.",
            )
        )
    findings = [Finding(hosts[0].name, _CHECK, "warn", found, remedy) for found, remedy in problems]
    named = f"{len(hosts)} hosts with {sum(one.slots for one in hosts)} slots"
    return hosts, findings or [Finding(hosts[0].name, _CHECK, "ok", named)]


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
