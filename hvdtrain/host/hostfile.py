"""The hosts of a job, as the launchers' -H option and host files name them."""

import re
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.errors import UsageError

_NAME = re.compile(r"\w[\w.-]*")  # what starts with a dash would be an option of ssh
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\S+)")


@dataclass(frozen=True)
class HostSlots:
    """A host and the number of workers that may be started on it."""

    name: str
    slots: int


def parse_host_list(text: str) -> list[HostSlots]:
    """Read what launchers take after ``-H``, such as ``host1:2,host2:2``.

    Raises:
        UsageError: naming the word that is wrong.
    """
    hosts = []
    for word in text.split(","):
        name, colon, slots = word.strip().partition(":")
        if not colon:
            raise UsageError(
                f"-H {text}: {word.strip()!r} has no number of workers", "Write host1:2,host2:2."
            )
        hosts.append(_host(name, slots, f"-H {text}"))
    return _checked(hosts, f"-H {text}")


def read_host_file(path: Path) -> list[HostSlots]:
    """Read a host file: a line ``host1 slots=2`` for every host; empty lines and # comments are left out.

    Raises:
        UsageError: naming the file and the line that is wrong.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"cannot read the host file {path}: {reason}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        words = line.partition("#")[0].strip()
        if not words:
            continue
        match = _LINE.fullmatch(words)
        if match is None:
            raise UsageError(f"{path}, line {number}: {words!r} is not a host", "Write host1 slots=2.")
        hosts.append(_host(match[1], match[2], f"{path}, line {number}"))
    return _checked(hosts, str(path))


def _host(name: str, slots: str, where: str) -> HostSlots:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{where}: {name!r} is not the name or IPv4 address of a host")
    if not slots.isdecimal() or int(slots) < 1:
        raise UsageError(f"{where}: {name} has {slots!r} slots; a number of workers, 1 or more, is expected")
    return HostSlots(name, int(slots))


def _checked(hosts: list[HostSlots], where: str) -> list[HostSlots]:
    if not hosts:
        raise UsageError(f"{where} names no host", "Write a line such as: host1 slots=2")
    names = [host.name for host in hosts]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice:
        raise UsageError(f"{where} names {twice} twice", "Give each host once, with all its slots.")
    return hosts
