"""The network interface through which a worker of an elastic job connects to the others of its world."""

import contextlib
import socket
from collections.abc import Iterator

from hvdtrain.host.network import interfaces, own_addresses
from hvdtrain.workers.world import World

_LOOPBACK = "127."


def interface_for(world: World) -> str:
    """Return the interface for Gloo's connections: loopback if all workers are on one host.

    Otherwise it is the one with the route to the world's rendezvous, or, on the host of the rendezvous, to
    a worker of another host. Without such a route it is the first one that other hosts may reach.
    """
    by_address = {
        text.partition("/")[0]: name for name, texts in interfaces(loopback=True).items() for text in texts
    }
    if world.one_host:
        return by_address.get(f"{_LOOPBACK}0.0.1", "lo")
    for host in (world.store[0], *_other_hosts(world)):
        address = _address_towards(host)
        if address in by_address and not address.startswith(_LOOPBACK):
            return by_address[address]
    return next(iter(own_addresses()), "lo")


def _other_hosts(world: World) -> Iterator[str]:
    yield from dict.fromkeys(member.host for member in world.members if member.host != world.host)


def _address_towards(host: str) -> str:
    """Return this host's address on the route to another; empty without a route."""
    with (
        contextlib.suppress(OSError, UnicodeError),
        socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe,
    ):
        probe.connect((host, 9))  # sends nothing: it only looks up the route
        return str(probe.getsockname()[0])
    return ""
