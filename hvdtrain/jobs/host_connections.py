"""The connections of a job that are watched: one from each host to rank 0."""

import contextlib
import secrets
import socket
from dataclasses import dataclass
from pathlib import Path

from hvdtrain.agreement import Workers
from hvdtrain.host.network import Addresses, own_addresses, reachable_by_others, receive_exactly
from hvdtrain.jobs.token_accept import accept_with_token, greeting

_PROBES = 3
_CONNECT_SECONDS = 5.0
_MAX_ADDRESSES = 3  # addresses of rank 0 to try, one after the other
_TOKEN_BYTES = 32


@dataclass(frozen=True)
class HostRanks:
    """A host of the job with the ranks of its workers.

    Attributes:
        name: the name of the host.
        rank: the lowest rank on the host, whose worker is connected to rank 0.
        ranks: all ranks on the host.
    """

    name: str
    rank: int
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        """Return host and ranks, such as "host h2 (ranks 2, 3)"."""
        word = "rank" if len(self.ranks) == 1 else "ranks"
        return f"host {self.name} ({word} {', '.join(map(str, self.ranks))})"


def group_by_host(workers: Workers) -> list[HostRanks]:
    """Collective. Return the hosts with their ranks, that of rank 0 first. Machines may have equal names."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
    except OSError:
        machine = ""
    ranks: dict[tuple[str, str], list[int]] = {}
    for rank, key in enumerate(workers.allgather_object((workers.host, machine))):
        ranks.setdefault(key, []).append(rank)
    return [HostRanks(host, own[0], tuple(own)) for (host, _), own in ranks.items()]


def connect_hosts(
    workers: Workers, hosts: list[HostRanks], seconds: int
) -> tuple[dict[socket.socket, HostRanks], list[HostRanks]]:
    """Collective. Connect one worker of each host to rank 0.

    Rank 0 listens only during this call, on the job's network, and accepts only connections that send a
    token, which the workers receive by a collective.

    Returns:
        This worker's connections, each with the host at the other end, and the hosts without a connection.
    """
    everyone = workers.allgather_object(own_addresses())
    token = secrets.token_bytes(_TOKEN_BYTES)
    own = next((host for host in hosts if host.rank == workers.rank), None)
    connections: dict[socket.socket, HostRanks] = {}
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        if workers.rank == 0:
            listeners = _listen(stack, everyone[0], [everyone[host.rank] for host in hosts[1:]])
        addresses = [listener.getsockname() for listener in listeners]
        addresses, token = workers.broadcast_object((addresses, token))
        if workers.rank == 0:
            expected = {host.rank: host for host in hosts[1:]}
            # the workers need the time to try all addresses
            connections = accept_with_token(
                listeners, token, expected, _CONNECT_SECONDS * max(1, len(listeners))
            )
        elif (
            own is not None and (connection := _connect_to_rank_0(addresses, token, workers.rank)) is not None
        ):
            connections = {connection: hosts[0]}
    for connection in connections:
        keep_alive(connection, seconds)
    connected = workers.broadcast_object({host.rank for host in connections.values()})
    return connections, [host for host in hosts[1:] if host.rank not in connected]


def _listen(stack: contextlib.ExitStack, own: Addresses, others: list[Addresses]) -> list[socket.socket]:
    """Listen on this host's addresses in networks that the other hosts share, never on all addresses."""
    listeners = []
    for address in reachable_by_others(own, others)[:_MAX_ADDRESSES]:
        listener = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_STREAM))
        try:
            listener.bind((address, 0))
            listener.listen(1024)
        except OSError:
            continue
        listeners.append(listener)
    return listeners


def _connect_to_rank_0(addresses: list[tuple[str, int]], token: bytes, rank: int) -> socket.socket | None:
    """Connect to rank 0 at the first of its addresses that responds; None if none does."""
    for address in addresses:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            connection = stack.enter_context(socket.create_connection(address, _CONNECT_SECONDS - 1))
            connection.sendall(greeting(token, rank))
            receive_exactly(connection, 1)
            stack.pop_all()
            return connection
    return None


def keep_alive(connection: socket.socket, seconds: int) -> None:
    """Let the kernel end a connection after this number of seconds without a response of the other side."""
    interval = max(1, seconds // (_PROBES + 1))
    options = {
        "TCP_KEEPIDLE": max(1, seconds - _PROBES * interval),
        "TCP_KEEPINTVL": interval,
        "TCP_KEEPCNT": _PROBES,
    }
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in options.items():
        if (option := getattr(socket, name, None)) is not None:  # macOS has other names
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
