"""Adasum: what both frameworks' ``adasum.py`` share, and the jobs that cannot have it.

Adasum (Maleki et al. 2020, arXiv:2006.02924) adds what two workers have learned as far as it differs, and
averages it as far as it is the same. For the movements a and b of a parameter's values::

    adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b

Workers 0 and 1, 2 and 3 and so on are combined, then the pairs, and so on. Horovod computes it in place of a
sum, over MPI.
"""

from collections.abc import Mapping

from hvdtrain.agreement import Workers
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError
from hvdtrain.horovod_build.installed import BUILD_COMMAND, installed_build

_NEEDS_MPI = f"Install Open MPI and build Horovod with it ({BUILD_COMMAND})"
_MOST_BYTES = 2**31 - 1  # Horovod counts the bytes of a tensor in 32 bits


def check_adasum(config: Config, workers: Workers, on_gpu: bool) -> None:
    """Check that a job can have the Adasum that its config may ask for.

    Args:
        config: the config.
        workers: the job's workers.
        on_gpu: whether this worker computes on a GPU.

    Raises:
        ConfigError: naming what it cannot be used with.
    """
    if config.outer_optimizer != "adasum" or workers.size == 1:
        return
    everywhere = True
    others = "--outer-optimizer average or nesterov"
    if workers.controller != "MPI":
        refused = f"{workers.controller}: Horovod has it over MPI alone"
        build = installed_build()
        start = "Start the job with horovodrun --mpi" if build is None or build.mpi else _NEEDS_MPI
        remedy = f"{start}, or use {others}."
    elif workers.size & (workers.size - 1):
        refused = f"{workers.size} workers: they are combined two by two, so they must be 2, 4, 8 and so on"
        remedy = f"Start another number of workers, or use {others}."
    elif on_gpu:
        refused = "GPUs: there Horovod averages the workers of a host, and has Adasum between hosts alone"
        remedy = f"Use --device cpu, or {others}."
        everywhere = False  # other workers may be on CPUs
    else:
        return
    raise ConfigError(f"outer_optimizer adasum cannot be used with {refused}", remedy, everywhere=everywhere)


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Check that Horovod can combine parameters.

    Args:
        sizes: bytes of each as it is sent, by its path.

    Raises:
        ConfigError: If one is too large.
    """
    for path, size in sizes.items():
        if size > _MOST_BYTES:
            raise ConfigError(
                f"outer_optimizer adasum: {path} has {size / 2**30:.1f} GiB, and Horovod combines less than "
                "2 GiB at once",
                "Use --outer-optimizer average or nesterov.",
                everywhere=True,
            )
