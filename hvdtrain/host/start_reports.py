"""While Horovod starts: what a worker tells horovodrun, and which workers of its host are stopped.

Over MPI, horovodrun cannot see which workers have arrived. The Horovod that hvdtrain builds gives each worker
an address and a key, and names the workers that do not report. Over Gloo it looks into its own store.
"""

import contextlib
import hmac
import os
import socket
import threading
from collections.abc import Iterator, Mapping

import psutil

from hvdtrain.errors import UsageError

REPORT_VARIABLE = "HOROVOD_START_REPORT"  # address:port:key
_LIMIT_VARIABLE = "HOROVOD_START_TIMEOUT"  # horovodrun's --start-timeout
_LIMIT_SECONDS = 60.0
_MOST_SECONDS = 86_400
_EVERY_SECONDS = 1.0  # a datagram may be lost

# what the workers of one job have in common, with the variable of the rank
_JOBS = (("HOROVOD_GLOO_RENDEZVOUS_PORT", "HOROVOD_RANK"), ("PMIX_NAMESPACE", "OMPI_COMM_WORLD_RANK"))


def start_limit(environ: Mapping[str, str] = os.environ) -> float:
    """Return how many seconds a worker waits for the others to start Horovod.

    Raises:
        UsageError: If the user's limit is not a number of seconds.
    """
    given = environ.get(_LIMIT_VARIABLE)
    if given is None:
        return _LIMIT_SECONDS
    with contextlib.suppress(ValueError):
        if 0 < (seconds := float(given)) <= _MOST_SECONDS:
            return seconds
    raise UsageError(
        f"{_LIMIT_VARIABLE} must be a number of seconds between 0 and {_MOST_SECONDS}, found {given!r}",
        "It is horovodrun's --start-timeout: how long workers wait for one that does not start (60).",
        everywhere=True,
    )


@contextlib.contextmanager
def reported_start(rank: int | None, environ: Mapping[str, str] = os.environ) -> Iterator[None]:
    """Context manager: tell horovodrun that this worker starts Horovod; at a good end, that all have.

    Args:
        rank: this worker's rank, or None without a launcher.
        environ: the environment; without horovodrun's variable in it, nothing is sent.
    """
    address, port, key = [*environ.get(REPORT_VARIABLE, "").split(":"), "", ""][:3]
    if rank is None or not port.isdecimal():
        yield
        return
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:

        def send(message: bytes) -> None:
            with contextlib.suppress(OSError):  # the report is a help, not a condition
                digest = hmac.digest(bytes.fromhex(key), message, "sha256")
                sender.sendto(digest + message, (address, int(port)))

        def repeat() -> None:
            send(b"%d" % rank)
            while not ended.wait(_EVERY_SECONDS):
                send(b"%d" % rank)

        ended = threading.Event()
        thread = threading.Thread(target=repeat, daemon=True, name="start-reports")
        thread.start()
        try:
            yield
            send(b"all")
        finally:
            ended.set()
            thread.join()


def stopped_workers(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the job's workers on this host that a signal or a debugger has stopped, in words."""
    found: dict[int, str] = {}
    for job, rank_variable in _JOBS:
        if job not in environ:
            continue
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError, ValueError):
                theirs = process.environ()
                is_stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
                if is_stopped and theirs.get(job) == environ[job] and rank_variable in theirs:
                    rank = int(theirs[rank_variable])
                    found.setdefault(rank, f"rank {rank} (process {process.pid})")
    return [found[rank] for rank in sorted(found)]
