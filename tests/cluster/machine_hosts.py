"""Hosts that show this machine's files: what is private to each, and how its sshd starts."""

import os
import pwd
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

SSH_PORT = 22
_SSHD_CONFIG = """\
ListenAddress {address}
Port {port}
HostKey {folder}/host_key
PidFile {folder}/sshd.pid
AuthorizedKeysFile .ssh/authorized_keys
PermitRootLogin prohibit-password
PasswordAuthentication no
KbdInteractiveAuthentication no
UsePAM no
MaxStartups 100
"""
_READY = """\
for host; do
    [ "$(ssh -o BatchMode=yes -o ConnectTimeout=60 $host hostname)" = $host ] || exit 1
done
"""


@dataclass(frozen=True)
class HostFiles:
    """A host's file systems, and its ssh daemon."""

    mounts: list[list[str]]  # commands that set them up, inside the host's namespaces
    prefix: list[str]  # gives a command the host's user and environment
    sshd: list[str]
    port: int
    ready: list[str]  # for the head: ends well when all hosts let it in


def machine_hosts(folder: Path, addresses: dict[str, str]) -> dict[str, HostFiles]:
    """Write the private files of all hosts: a home each, all names, one key pair, known host keys."""
    home = folder / "home"
    home.mkdir()
    (folder / "passwd").write_text(_passwd(home))
    names = "".join(f"{address}\t{name}\n" for name, address in addresses.items())
    (folder / "hosts").write_text(f"127.0.0.1\tlocalhost\n{names}")
    keygen(folder / "key")
    known = ""
    for name, address in addresses.items():
        own = folder / name
        own.mkdir()
        keygen(own / "host_key")
        known += f"{name},{address} {(own / 'host_key.pub').read_text()}"
        (own / "hostname").write_text(f"{name}\n")
        (own / "sshd_config").write_text(_SSHD_CONFIG.format(address=address, port=SSH_PORT, folder=own))
    for name in addresses:
        _write_home(folder / name / "home", folder / "key", known)
    ready = ["sh", "-euc", _READY, "sh", *addresses]
    return {name: _host(folder, folder / name, home, ready) for name in addresses}


def keygen(path: Path) -> None:
    """Make a key pair without a passphrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", path], check=True)


def _host(folder: Path, own: Path, home: Path, ready: list[str]) -> HostFiles:
    binds = [(folder / "hosts", "/etc/hosts"), (folder / "passwd", "/etc/passwd"), (own / "home", home)]
    if Path("/etc/hostname").exists():
        binds.append((own / "hostname", "/etc/hostname"))
    mounts = [["mount", "--bind", str(source), str(target)] for source, target in binds]
    mounts += [
        ["mount", "-t", "tmpfs", "-o", "mode=1777", "shm", "/dev/shm"],
        ["mount", "-t", "tmpfs", "-o", "mode=755", "run", "/run"],
        ["mkdir", "/run/sshd"],
        *_sys(),
    ]
    sshd = [shutil.which("sshd") or "sshd", "-f", str(own / "sshd_config"), "-E", str(own / "sshd.log")]
    return HostFiles(mounts, ["env", f"HOME={home}"], sshd, SSH_PORT, ready)


def _sys() -> list[list[str]]:
    """Give the commands that mount /sys for the namespace's network, and keep the cgroups in it."""
    sysfs = ["mount", "-t", "sysfs", "sysfs", "/sys"]
    groups, kept = "/sys/fs/cgroup", "/run/cgroup"
    if not Path(groups).is_mount():
        return [sysfs]
    return [
        ["mkdir", kept],
        ["mount", "--rbind", groups, kept],
        sysfs,
        ["mount", "--rbind", kept, groups],
        ["umount", "--recursive", kept],
    ]


def _passwd(home: Path) -> str:
    """Give /etc/passwd with another home for this user: ssh and sshd look it up there."""
    lines = Path("/etc/passwd").read_text().splitlines()
    me = pwd.getpwuid(os.getuid())
    changed = [
        ":".join([*line.split(":")[:5], str(home), me.pw_shell])
        if line.startswith(f"{me.pw_name}:")
        else line
        for line in lines
    ]
    return "\n".join(changed) + "\n"


def _write_home(home: Path, key: Path, known_hosts: str) -> None:
    """Write a home with the ssh files of a user who may go to every host."""
    folder = home / ".ssh"
    folder.mkdir(parents=True, mode=0o700)
    home.chmod(0o700)
    shutil.copy(key, folder / "id_ed25519")  # with its mode
    shutil.copy(key.with_suffix(".pub"), folder / "authorized_keys")
    (folder / "known_hosts").write_text(known_hosts)
