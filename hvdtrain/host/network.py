"""The network interfaces and addresses of this host, and which of them other hosts can use."""

import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

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
    """Return the interfaces that are up and have IPv4 addresses, with these addresses.

    Args:
        loopback: whether to include loopback addresses (127.*).
    """
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
    """Return the IPv4 addresses at which other hosts may reach this host, by interface.

    If interfaces were chosen for the job, only these are included.
    """
    chosen = chosen_interfaces()
    return {name: texts for name, texts in interfaces().items() if not chosen or name in chosen}


def reachable_by_others(own: Addresses, others: list[Addresses]) -> list[str]:
    """Return this host's addresses in networks that all other hosts share, or all if there are none."""
    flat = [ipaddress.ip_interface(text) for texts in own.values() for text in texts]
    hosts = [[ipaddress.ip_interface(text) for texts in other.values() for text in texts] for other in others]
    common = [one for one in flat if all(any(other.ip in one.network for other in host) for host in hosts)]
    return [str(one.ip) for one in common or flat]


def receive_exactly(connection: socket.socket, size: int) -> bytes:
    """Receive exactly this number of bytes.

    Raises:
        OSError: If the connection is closed or times out before.
    """
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the connection was closed")
        data += part
    return data
