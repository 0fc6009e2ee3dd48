"""Log in on other hosts over ssh, and explain why it failed."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

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
