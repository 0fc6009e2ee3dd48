"""Going to another host over ssh, and saying why that does not work."""

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.doctor.findings import Finding

_CONNECT_SECONDS = 5
# what horovodrun passes on that decides which Python runs; never the whole environment: it holds secrets
_PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH")
_NO_PYTHON, _NO_HVDTRAIN = "hvdtrain-doctor: no python", "No module named hvdtrain"
# (text of ssh, found, remedy); the first that fits counts. {host} and {ssh} are filled in.
_OUTCOMES = (
    ("Could not resolve hostname", "the name {host} does not resolve on this host",
     "Correct it in the host file, or add it to DNS, /etc/hosts or ~/.ssh/config."),
    ("REMOTE HOST IDENTIFICATION HAS CHANGED", "its host key is another than the one known for {host}",
     "If it was installed anew: ssh-keygen -R {host}, then log in once by hand and compare the "
     "fingerprint. If not, somebody may be in between."),
    ("Host key verification failed", "its host key is not known here",
     "Log in once by hand and compare the fingerprint ({ssh}), or add the key to ~/.ssh/known_hosts."),
    ("Permission denied", "it refuses the ssh key (no login without a password)",
     "Run ssh-copy-id {host}; there, ~/.ssh and authorized_keys must be writable by the user alone."),
    ("Connection refused", "it is up, but nothing listens on its ssh port",
     "Start sshd there (systemctl start ssh), or give its port (--ssh-port, or Port in ~/.ssh/config)."),
    ("No route to host", "there is no way to it: it is down, or in another network",
     "Start it, plug it in, or correct its address."),
    ("Network is unreachable", "this host has no route to its network", "Correct the address or the routes."),
    ("timed out", "it does not answer on its ssh port: it is down, or a firewall drops the connection",
     "Start it, or let ssh pass."),
    ("Connection closed by", "sshd closed the connection",
     "See its log there (journalctl -u ssh): the shell of the account, limits, a ban."),
    ("Connection reset by", "sshd closed the connection",
     "See its log there (journalctl -u ssh): the shell of the account, limits, a ban."),
    ("UNPROTECTED PRIVATE KEY FILE", "the private key is readable by others, so ssh does not use it",
     "chmod 600 it."),
)  # fmt: skip


@dataclass(frozen=True)
class SshOptions:
    """How to log in, beyond ~/.ssh/config.

    Attributes:
        port: of sshd; None for ssh's own choice.
        identity: the private key's file; None for ssh's own choice.
    """

    port: int | None = None
    identity: Path | None = None

    def words(self, host: str) -> list[str]:
        """Give the command that logs in on a host: it asks nothing, and checks host keys as always."""
        options = ["BatchMode=yes", f"ConnectTimeout={_CONNECT_SECONDS}", "ServerAliveInterval=5"]
        words = ["ssh", *(word for option in options for word in ("-o", option))]
        words += ["-p", str(self.port)] if self.port else []
        words += ["-i", str(self.identity)] if self.identity else []
        return [*words, "-T", host]


def agent_script(environ: Mapping[str, str] = os.environ) -> str:
    """Give the shell script that starts this Python, in this directory, on whatever host it runs on."""
    python, directory = shlex.quote(sys.executable), shlex.quote(os.getcwd())
    passed_on = " ".join(f"{name}={shlex.quote(environ[name])}" for name in _PASSED_ON if name in environ)
    return (
        f"cd {directory} 2>/dev/null; "
        f"test -x {python} || {{ echo {shlex.quote(_NO_PYTHON)} >&2; exit 90; }}; "
        f"exec env {passed_on} {python} -m hvdtrain doctor --agent"
    )


def why_not(host: str, code: int, stderr: str, over_ssh: bool) -> Finding:
    """Say why an examination did not run on a host.

    Args:
        host: its name.
        code: exit code of ssh, which is the script's unless it is 255.
        stderr: what ssh and the script wrote there.
        over_ssh: whether ssh was used at all.
    """
    if over_ssh and code == 255:
        for text, found, remedy in _OUTCOMES:
            if text in stderr:
                names = {"host": host, "ssh": f"ssh {host}"}
                check = "name" if text.startswith("Could not resolve") else "ssh"
                return Finding(host, check, "fail", found.format(**names), remedy.format(**names))
        return Finding(host, "ssh", "fail", f"ssh failed: {_last_line(stderr)}", f"Try by hand: ssh {host}")
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
        host, "doctor", "fail", f"the examination ended there with exit code {code}: {_last_line(stderr)}",
        f"Try there: {sys.executable} -m hvdtrain doctor",
    )  # fmt: skip


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"
