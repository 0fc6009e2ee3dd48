"""Parse the hosts of a job from a host file or from the launchers' -H option."""

import ipaddress
import os
import re
import socket
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

from hvdtrain.errors import UsageError

# for each interface, its addresses with the prefix length of their network, such as "10.0.0.1/24"
Addresses = Mapping[str, list[str]]

# the variables in which launchers and users choose the interfaces of the job
_INTERFACE_VARIABLES = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")


def chosen_interfaces(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the interfaces that the launcher or the user chose for the job; empty if none were chosen."""
    for variable in _INTERFACE_VARIABLES:
        names = [name for name in environ.get(variable, "").split(",") if name]
        if names and not any(name[0] in "^=" or "/" in name for name in names):  # a pattern or a network
            return names
    return []


def interfaces(*, loopback: bool = False) -> dict[str, list[str]]:
    """Return the interfaces that are up and have IPv4 addresses, with these addresses."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            is_wanted = entry.family == socket.AF_INET and (loopback or not entry.address.startswith("127."))
            if name in up and is_wanted:
                address = ipaddress.IPv4Interface(f"{entry.address}/{entry.netmask or 32}")
                found.setdefault(name, []).append(str(address))
    return found


def own_addresses() -> dict[str, list[str]]:
    """Return the IPv4 addresses at which other hosts may reach this host, by interface."""
    chosen = chosen_interfaces()
    return {name: texts for name, texts in interfaces().items() if not chosen or name in chosen}


def address_towards(host: str) -> str:
    """Return this host's address on the route to another; empty without a route."""
    with suppress(OSError, UnicodeError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing: it only looks up the route
        return str(probe.getsockname()[0])
    return ""


def reachable_by_others(own: Addresses, others: list[Addresses]) -> list[str]:
    """Return this host's addresses in networks that all other hosts share, or all if there are none."""
    flat = [ipaddress.ip_interface(text) for texts in own.values() for text in texts]
    hosts = [[ipaddress.ip_interface(text) for texts in other.values() for text in texts] for other in others]
    common = [one for one in flat if all(any(other.ip in one.network for other in host) for host in hosts)]
    return [str(one.ip) for one in common or flat]


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive exactly this number of bytes."""
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data


HOST_NAME = re.compile(r"\w[\w.-]*")  # no leading dash: ssh would take the name for an option
HOST_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\S+)")


class HostSlots(NamedTuple):
    """A host and its slots."""

    name: str  # name or IPv4 address
    slots: int  # the maximum number of workers on the host


def parse_host_list(text: str) -> list[HostSlots]:
    """Parse the value of the launchers' option ``-H``, such as ``host1:2,host2:2``."""
    hosts, source = [], f"-H {text}"
    for entry in text.split(","):
        name, colon, slots = entry.strip().partition(":")
        if not colon:
            problem = f"{source}: {entry.strip()!r} has no number of workers"
            raise UsageError(problem, "Write host1:2,host2:2.")
        hosts.append(_host(name, slots, source))
    return _checked(hosts, source)


def read_host_file(path: Path) -> list[HostSlots]:
    """Read a host file: a line ``host1 slots=2`` per host. Empty lines and comments (#) are ignored."""
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
        if (match := HOST_LINE.fullmatch(entry)) is None:
            raise UsageError(f"{path}, line {number}: {entry!r} is not a host", "Write host1 slots=2.")
        hosts.append(_host(match[1], match[2], f"{path}, line {number}"))
    return _checked(hosts, str(path))


def _host(name: str, slots: str, source: str) -> HostSlots:
    if not HOST_NAME.fullmatch(name):
        raise UsageError(f"{source}: {name!r} is not the name or IPv4 address of a host")
    if not slots.isdecimal() or int(slots) < 1:
        raise UsageError(f"{source}: {name} has {slots!r} slots; a number of workers, 1 or more, is expected")
    return HostSlots(name, int(slots))


def _checked(hosts: list[HostSlots], source: str) -> list[HostSlots]:
    if not hosts:
        raise UsageError(f"{source} names no host", "Write a line such as: host1 slots=2")
    name, count = Counter(host.name for host in hosts).most_common(1)[0]
    if count > 1:
        raise UsageError(f"{source} names {name} twice", "Give each host once, with all its slots.")
    return hosts
