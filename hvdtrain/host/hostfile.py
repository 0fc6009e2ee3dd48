"""Parse the hosts of a job from a host file or from the launchers' -H option."""

import re
from pathlib import Path
from typing import NamedTuple

from hvdtrain.errors import UsageError

_NAME = re.compile(r"\w[\w.-]*")  # no leading dash: ssh would take the name for an option
_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\S+)")


class HostSlots(NamedTuple):
    """A host and its slots.

    Attributes:
        name: name or IPv4 address.
        slots: the maximum number of workers on the host.
    """

    name: str
    slots: int


def parse_host_list(text: str) -> list[HostSlots]:
    """Parse the value of the launchers' option ``-H``, such as ``host1:2,host2:2``.

    Raises:
        UsageError: If the value is invalid; the message quotes the invalid entry.
    """
    hosts = []
    for entry in text.split(","):
        name, colon, slots = entry.strip().partition(":")
        if not colon:
            raise UsageError(
                f"-H {text}: {entry.strip()!r} has no number of workers", "Write host1:2,host2:2."
            )
        hosts.append(_host(name, slots, f"-H {text}"))
    return _checked(hosts, f"-H {text}")


def read_host_file(path: Path) -> list[HostSlots]:
    """Read a host file: a line ``host1 slots=2`` per host. Empty lines and comments (#) are ignored.

    Raises:
        UsageError: If the file cannot be read or is invalid; the message names the file and the line.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
        raise UsageError(f"cannot read the host file {path}: {reason}") from None
    hosts = []
    for number, line in enumerate(lines, start=1):
        entry = line.partition("#")[0].strip()
        if not entry:
            continue
        match = _LINE.fullmatch(entry)
        if match is None:
            raise UsageError(f"{path}, line {number}: {entry!r} is not a host", "Write host1 slots=2.")
        hosts.append(_host(match[1], match[2], f"{path}, line {number}"))
    return _checked(hosts, str(path))


def _host(name: str, slots: str, source: str) -> HostSlots:
    if not _NAME.fullmatch(name):
        raise UsageError(f"{source}: {name!r} is not the name or IPv4 address of a host")
    if not slots.isdecimal() or int(slots) < 1:
        raise UsageError(f"{source}: {name} has {slots!r} slots; a number of workers, 1 or more, is expected")
    return HostSlots(name, int(slots))


def _checked(hosts: list[HostSlots], source: str) -> list[HostSlots]:
    if not hosts:
        raise UsageError(f"{source} names no host", "Write a line such as: host1 slots=2")
    names = [host.name for host in hosts]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate:
        raise UsageError(f"{source} names {duplicate} twice", "Give each host once, with all its slots.")
    return hosts
