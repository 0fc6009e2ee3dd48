"""Environment variables for Open MPI and Horovod that are set when a worker starts."""

import os
from collections.abc import MutableMapping

from hvdtrain.host.cores import cores_per_worker
from hvdtrain.host.launcher import launched_rank, workers_on_this_host

_STALL_SHUTDOWN_SECONDS = 600
_GLOO_TIMEOUT_SECONDS = 60


def prepare(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set the variables that this worker needs, before its native libraries start.

    A variable that the user has set is not changed.

    - Without a launcher, use Horovod's Gloo controller: it starts in milliseconds and needs no MPI.
    - With fewer than two cores per worker, one for computation and one for communication, let Open MPI
      yield while it waits. Otherwise its waiting thread occupies a core that is needed for computation.
    - End the job if a collective stalls for ten minutes. By default, Horovod waits without limit.
    - Over Gloo, let workers wait for each other for a minute at the start. Horovod's 30 seconds are too
      short if importing a framework is slow on a host or its file system.

    Returns:
        The variables that were set under a launcher, by name; empty without a launcher.
    """
    wanted: dict[str, str] = {}
    if launched_rank() is None:
        wanted.update(HOROVOD_CONTROLLER="gloo", HOROVOD_CPU_OPERATIONS="gloo")
    else:
        wanted["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] = str(_STALL_SHUTDOWN_SECONDS)
        if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in environ:
            wanted["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(_GLOO_TIMEOUT_SECONDS)
        local_size = workers_on_this_host(environ)
        if local_size and cores_per_worker(local_size) < 2:
            wanted["OMPI_MCA_mpi_yield_when_idle"] = "1"
    new = {name: value for name, value in wanted.items() if name not in environ}
    environ.update(new)
    return new if launched_rank() is not None else {}
