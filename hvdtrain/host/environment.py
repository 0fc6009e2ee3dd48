"""Environment variables for Open MPI and Horovod that are set when a worker starts."""

import math
import os
import socket
from collections.abc import Mapping, MutableMapping

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.cores import cores_per_worker
from hvdtrain.host.hostfile import chosen_interfaces, interfaces
from hvdtrain.host.launcher import is_elastic, launched_rank, stated_launch, workers_on_this_host
from hvdtrain.host.start_reports import start_limit

_GLOO_TIMEOUT = "HOROVOD_GLOO_TIMEOUT_SECONDS"
_DOCTOR = "To check all hosts: python -m hvdtrain doctor --hostfile FILE"


def check_host(environ: Mapping[str, str] = os.environ) -> None:
    """Check this host's name and network interfaces, and the time limit of Gloo. Local."""
    seconds = environ.get(_GLOO_TIMEOUT, "")
    if seconds and not (seconds.isascii() and seconds.isdecimal() and int(seconds)):
        raise EnvironmentFault(  # Horovod would take it as 0: no worker could connect
            f"{_GLOO_TIMEOUT} must be a whole number of seconds, at least 1; found {seconds!r}",
            "Set it to another value, or unset it.",
            everywhere=True,
        )
    host, alone = socket.gethostname(), launched_rank() is None
    # Gloo, which is also used without a launcher, crashes if it cannot resolve its host's name
    if alone or "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
        try:
            socket.gethostbyname(host)
        except OSError as error:
            raise EnvironmentFault(
                f"host {host} cannot resolve its own name: {error.strerror or error}",
                f"Add it to /etc/hosts there, with the address at which other hosts reach it. {_DOCTOR}",
            ) from None
    if (not alone or is_elastic(environ)) and (chosen := chosen_interfaces(environ)):
        check_interfaces(host, chosen)


def check_interfaces(host: str, chosen: list[str]) -> None:
    """Check that this host has one of some interfaces."""
    found = {name: texts[-1].partition("/")[0] for name, texts in interfaces(loopback=True).items()}
    if not any(name in found for name in chosen):
        existing = ", ".join(f"{name} {address}" for name, address in found.items() if name != "lo")
        raise EnvironmentFault(
            f"host {host} has no network interface {' or '.join(chosen)} with an IPv4 address; it has "
            f"{existing or 'loopback only'}",
            "All hosts of a job need an interface of the same name: rename it there, or choose another with "
            f"horovodrun --network-interfaces. {_DOCTOR}",
        )


# variables that hvdtrain set in this process, and their values
_set_here: dict[str, str] = {}

_UCX = "UCX_DEBUG_SIGNO"
_STALL_CHECK = "HOROVOD_STALL_CHECK_TIME_SECONDS"
_STALL_SHUTDOWN = "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"
_STALL_CHECK_SECONDS = 60  # Horovod's default
_GLOO_TIMEOUT_SECONDS = 60
_WAKE_UP_NANOSECONDS = 50_000  # a core wakes up one waiting worker in this time: a tenth of its time or less
_NO_LIMIT_SECONDS = 604_800  # a week, the largest stall timeout: Gloo has no other word for "no limit"


def prepare(
    environ: MutableMapping[str, str] = os.environ, stall_timeout: float | None = None
) -> dict[str, str]:
    """Set the variables that this worker needs, unless the user has; return those for Horovod and MPI."""
    wanted = {_UCX: "0"}  # UCX, which Open MPI may bring, would wait for a debugger at SIGHUP
    if elastic := is_elastic(environ):
        wanted[_GLOO_TIMEOUT] = _gloo_timeout(environ, stall_timeout)
        wanted["HOROVOD_LOG_LEVEL"] = "fatal"  # each worker that remains would print an error
    if elastic or launched_rank() is None:
        wanted.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    else:
        # Horovod checks for stalls once a minute, and refuses a limit below that
        shutdown = environ.get(_STALL_SHUTDOWN, "")
        if shutdown.isdecimal() and 0 < int(shutdown) <= _STALL_CHECK_SECONDS:
            wanted[_STALL_CHECK] = str(max(1, int(shutdown) // 2))
        local_size = workers_on_this_host(environ)
        launch = stated_launch(environ)
        # the stall timeout names the worker, so it must come before Gloo's
        if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ or (launch and launch.size > local_size):
            wanted[_GLOO_TIMEOUT] = _gloo_timeout(environ, stall_timeout)
        cores = cores_per_worker(local_size) if local_size else math.inf
        # Open MPI waits by computing, and where there are fewer cores, other processes such as sshd starve
        if cores < 2:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if cores < 1:
            wanted["OMPI_MCA_threads_pthreads_yield_strategy"] = "nanosleep"
            wanted["OMPI_MCA_threads_pthreads_nanosleep_time"] = str(round(_WAKE_UP_NANOSECONDS / cores))
    if elastic or launched_rank() is not None:
        # what is fused depends on timing, and with it the order of sums
        wanted["HOROVOD_FUSION_THRESHOLD"] = "0"
    new = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(new)
    if environ is os.environ:
        _set_here.update(new)
    new.pop(_UCX, None)
    return new if elastic or launched_rank() is not None else {}


def for_children(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for workers that this process launches: without what its training has set."""
    return {name: value for name, value in environ.items() if _set_here.get(name) != value}


def _gloo_timeout(environ: Mapping[str, str], stall_timeout: float | None) -> str:
    stall_seconds = _NO_LIMIT_SECONDS if stall_timeout == 0 else stall_timeout or 0
    return str(math.ceil(max(_GLOO_TIMEOUT_SECONDS + stall_seconds, start_limit(environ))))
