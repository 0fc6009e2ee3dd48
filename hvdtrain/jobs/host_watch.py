"""Watch the hosts of a job, so that the other workers do not wait for a host that was lost.

A process that ends closes its connections, and the collectives of the other workers fail at once. A host
that loses power or network closes no connection: Gloo waits for it for a while, MPI without limit. So one
worker of each host keeps a connection to rank 0. No data is sent on it; the kernels check by TCP keepalive
that the other side still responds, independently of the processes. A busy or stopped worker is therefore
not reported as lost, and a training step costs nothing.
"""

import contextlib
import os
import selectors
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.agreement import Workers
from hvdtrain.errors import PeerLostError
from hvdtrain.jobs.host_connections import HostRanks, connect_hosts, group_by_host

_VARIABLE = "HVDTRAIN_HOST_SILENCE_SECONDS"
_SILENCE_SECONDS = 20

# called with the error, by the watching thread
OnHostLost = Callable[[PeerLostError], None]


class Watching:
    """State that the host watch and the job share.

    Attributes:
        note: a text that names the hosts that cannot be watched; empty if there are none.
        on_host_lost: called with the problem before the process ends, to record it.
    """

    def __init__(self) -> None:
        self.note = ""
        self.on_host_lost: Callable[[str], None] = lambda problem: None


def silence_seconds(environ: Mapping[str, str] = os.environ) -> int:
    """Return after how many seconds of silence a host counts as lost; 0 if hosts are not to be watched."""
    value = environ.get(_VARIABLE, "")
    return int(value) if value.isdecimal() else _SILENCE_SECONDS


def watch_hosts(workers: Workers, on_lost: OnHostLost) -> tuple["HostWatch", str]:
    """Collective. Start to watch the hosts of the job.

    Args:
        workers: the workers.
        on_lost: called once with the error if a host is lost, in a thread, on one worker of each remaining
            host.

    Returns:
        The watch, and a text that names the hosts that cannot be watched, empty if there are none.
    """
    hosts = group_by_host(workers)
    seconds = workers.broadcast_object(silence_seconds()) if len(hosts) > 1 else 0
    if not seconds:
        return HostWatch({}, workers.rank, seconds, on_lost), ""
    connections, unwatched = connect_hosts(workers, hosts, seconds)
    return HostWatch(connections, workers.rank, seconds, on_lost), _describe_unwatched(unwatched, hosts[0])


class HostWatch:
    """A thread that waits until a connection fails.

    Args:
        connections: the connections to watch, each with the host at the other end.
        rank: this worker's rank; rank 0 notifies the other workers of a lost host.
        seconds: the time of silence after which the kernel ends a connection.
        on_lost: called if a host is lost.
    """

    def __init__(
        self, connections: dict[socket.socket, HostRanks], rank: int, seconds: int, on_lost: OnHostLost
    ) -> None:
        self._connections, self._rank, self._seconds, self._on_lost = connections, rank, seconds, on_lost
        self._wake, self._woken = socket.socketpair()
        self._thread: threading.Thread | None = None
        if connections:
            self._thread = threading.Thread(target=self._wait, daemon=True, name="watch hosts")
            self._thread.start()

    def close(self) -> None:
        """Stop watching."""
        self._wake.close()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        for connection in (*self._connections, self._woken):
            connection.close()

    def _wait(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ)
            while len(selector.get_map()) > 1:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        return
                    lost, detected_here = self._read_lost_host(key.fileobj)
                    if lost:
                        self._report(lost, detected_here)
                        return
                    selector.unregister(key.fileobj)

    def _read_lost_host(self, connection: Any) -> tuple[str, bool]:
        """Return which host is lost, empty if none is, and whether this worker detected it itself.

        If only the process at the other end has ended, no host is lost: collectives detect that.
        """
        try:
            return connection.recv(4096).decode(errors="replace"), False
        except (ConnectionResetError, BrokenPipeError):
            return "", True
        except OSError:
            return str(self._connections[connection]), True

    def _report(self, lost: str, detected_here: bool) -> None:
        if self._rank == 0:
            for connection in self._connections:
                with contextlib.suppress(OSError):
                    connection.send(lost.encode(), socket.MSG_DONTWAIT)
        self._on_lost(
            PeerLostError(
                f"{lost} is gone: it has not answered for {self._seconds} s",
                "It lost power or network, or was too busy to respond. Check it, then continue from the "
                f"newest checkpoint with --resume. {_VARIABLE} sets how long a host may be silent.",
                everywhere=not detected_here,  # rank 0 prints it
            )
        )


def _describe_unwatched(unwatched: list[HostRanks], root: HostRanks) -> str:
    if not unwatched:
        return ""
    names = ", ".join(host.name for host in unwatched)
    return (
        f"cannot watch {names}: no connection to {root.name} other than Horovod's own; if one of them "
        "is lost, the job may wait for it for up to 10 minutes"
    )
