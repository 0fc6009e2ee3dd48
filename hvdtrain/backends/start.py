"""Starting Horovod: every failure of it, and a worker that never arrives, ends with a message."""

import contextlib
import socket
import sys
import time
from typing import Any

from hvdtrain.backends.workers import HorovodWorkers, check_abort, without_sources
from hvdtrain.elastic.member.membership import Membership
from hvdtrain.errors import EXIT_ENVIRONMENT, EnvironmentFault
from hvdtrain.host.launcher import launched_rank, stated_launch
from hvdtrain.host.processes import deadline
from hvdtrain.host.start_reports import (
    exit_at_once,
    report_begin,
    reported_start,
    start_limit,
    stopped_workers,
)

# So long a rank other than 0 waits before it speaks, per rank: the launcher ends it when another one has.
_SPEAK_AFTER_SECONDS = 0.5
_MOST_SECONDS = 4.0
_REMEDY = (
    "A worker is stopped or starved, still imports, or its host has no connection to the others; horovodrun "
    "names it.\n  Or the hosts have different builds of Horovod: `python -m hvdtrain doctor` compares them.\n"
    "  `horovodrun --start-timeout SECONDS`, or the variable HOROVOD_START_TIMEOUT with other "
    "launchers, waits longer."
)
_ALONE = (
    "A worker without a launcher connects to itself at 127.0.0.1: bring up the loopback interface, for "
    "example with `ip link set lo up`."
)


_ended: list[str] = []  # "MPI" if Horovod has ended over it: MPI starts once in a process


def forbid_restart(workers: object) -> None:
    """Note that Horovod has ended, if that was over MPI: it cannot start again in this process."""
    if isinstance(workers, HorovodWorkers) and workers.uses_mpi:
        _ended.append("MPI")


def start_horovod(
    hvd: Any,
    collectives: Any,
    membership: Membership | None = None,
    *,
    has_groups: bool = False,
) -> HorovodWorkers:
    """Collective. Start Horovod, unless it has started, and return the job's workers.

    MPI waits for ever for a worker that does not arrive, and that wait cannot be given up: the process
    ends with exit code 3 when the time is over.
    """
    if _ended:
        raise EnvironmentFault(
            "Horovod has ended in this process, after an error that not all workers had, and over MPI it "
            "starts once",
            "Start the job again.",
        )
    if membership is not None:
        check_abort()
    rank, seconds = launched_rank(), start_limit()
    try:
        with contextlib.ExitStack() as stack:
            if rank is not None:
                stack.enter_context(deadline(seconds, lambda: _give_up(rank, seconds)))
                report_begin(rank)
                stack.enter_context(reported_start(rank))
            options = {"process_sets": "dynamic"} if has_groups else {}
            hvd.init(**options)
    except ValueError as error:
        remedy = _ALONE if rank is None and membership is None else _REMEDY
        raise EnvironmentFault(f"Horovod could not start: {without_sources(error)}", remedy) from error
    return HorovodWorkers(hvd, collectives, membership)


def _give_up(rank: int, seconds: float) -> None:
    launch = stated_launch()
    count = f"the {launch.size} workers" if launch is not None and launch.size > 1 else "the workers"
    stopped = stopped_workers()
    if rank:
        time.sleep(min(_SPEAK_AFTER_SECONDS * (rank + 1), _MOST_SECONDS))
    here = f"; stopped on this host: {', '.join(stopped)}" if stopped else ""
    with contextlib.suppress(OSError):
        print(
            f"hvdtrain: rank {rank} on {socket.gethostname()}: not all of {count} started Horovod within "
            f"{seconds:g} s{here}\n  {_REMEDY}",
            file=sys.stderr,
            flush=True,
        )
    exit_at_once(EXIT_ENVIRONMENT)
