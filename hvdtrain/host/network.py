"""The addresses of this host, and which of them other hosts can use."""

import ipaddress
import os
import socket
from collections.abc import Mapping

import psutil

# by interface: addresses with the length of their network's prefix, such as "10.0.0.1/24"
Addresses = Mapping[str, list[str]]

# where launchers and users say which interfaces the job is to use
_CHOSEN = ("HOROVOD_GLOO_IFACE", "NCCL_SOCKET_IFNAME", "OMPI_MCA_btl_tcp_if_include")


def chosen_interfaces(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Give the interfaces that the job is to use, where launcher or user named some."""
    for variable in _CHOSEN:
        names = [name for name in environ.get(variable, "").split(",") if name]
        if names and not any(name[0] in "^=" or "/" in name for name in names):  # patterns, networks
            return names
    return []


def interfaces(*, loopback: bool = False) -> dict[str, list[str]]:
    """Give the interfaces that are up, with their IPv4 addresses, such as "10.0.0.1/24".

    Args:
        loopback: whether addresses that start with 127. count.
    """
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    found: dict[str, list[str]] = {}
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            counts = entry.family == socket.AF_INET and (loopback or not entry.address.startswith("127."))
            if name in up and counts:
                address = ipaddress.IPv4Interface(f"{entry.address}/{entry.netmask or 32}")
                found.setdefault(name, []).append(str(address))
    return found


def own_addresses() -> dict[str, list[str]]:
    """Give the IPv4 addresses that other hosts may know this one by, by interface.

    Only interfaces that the job is to use, where that is said.
    """
    chosen = chosen_interfaces()
    return {name: texts for name, texts in interfaces().items() if not chosen or name in chosen}


def reachable_by_others(own: Addresses, others: list[Addresses]) -> list[str]:
    """Give this host's addresses in networks that all other hosts are in; where there are none, all."""
    flat = [ipaddress.ip_interface(text) for texts in own.values() for text in texts]
    hosts = [[ipaddress.ip_interface(text) for texts in other.values() for text in texts] for other in others]
    common = [one for one in flat if all(any(other.ip in one.network for other in host) for host in hosts)]
    return [str(one.ip) for one in common or flat]
