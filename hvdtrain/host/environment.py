"""What hvdtrain sets for Open MPI and Horovod when a worker starts, where the user has not."""

import os
from collections.abc import MutableMapping

from hvdtrain.terminal import launched_rank, workers_here
from hvdtrain.threads import cores_per_worker

_STALL_SHUTDOWN_SECONDS = 600
_GLOO_TIMEOUT_SECONDS = 60


def prepare(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set what this worker needs before its native libraries start.

    - Without a launcher, Horovod's Gloo controller: it starts in milliseconds and needs no MPI.
    - Where the workers' compute and communication threads outnumber the cores, Open MPI yields
      while it waits; otherwise its waiting thread takes the core that computes.
    - A stalled collective ends the job after ten minutes; Horovod's default is never.
    - Over Gloo, workers wait a minute for one another's start; Horovod's 30 seconds are too few where a
      slow host or file system takes long to import a framework.

    Returns:
        What was set, by name; nothing that was set already.
    """
    wanted: dict[str, str] = {}
    if launched_rank() is None:
        wanted.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    else:
        wanted["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(_STALL_SHUTDOWN_SECONDS)
        if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
            wanted["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(_GLOO_TIMEOUT_SECONDS)
        local_size = workers_here(environ)
        if local_size and cores_per_worker(local_size) < 2:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    new = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(new)
    return new if launched_rank() is not None else {}
