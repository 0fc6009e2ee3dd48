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
    check_adasum_workers(config, workers.size, workers.controller)
    if on_gpu:
        raise _refusal(
            "GPUs: there Horovod averages the workers of a host, and has Adasum between hosts alone",
            "Use --device cpu",
            everywhere=False,  # other workers may be on CPUs
        )


def check_adasum_workers(config: Config, count: int, controller: str | None) -> None:
    """Check that a number of workers can have the Adasum that their config may ask for.

    Args:
        config: the config.
        count: the number.
        controller: "MPI" or another title; None if it is not known yet.

    Raises:
        ConfigError: naming what it cannot be used with.
    """
    if config.outer_optimizer != "adasum" or count == 1:
        return
    if controller not in (None, "MPI"):
        build = installed_build()
        start = "Start the job with horovodrun --mpi" if build is None or build.mpi else _NEEDS_MPI
        raise _refusal(f"{controller}: Horovod has it over MPI alone", start)
    if count & (count - 1):
        raise _refusal(
            f"{count} workers: they are combined two by two, so they must be 2, 4, 8 and so on",
            "Start another number of workers",
        )


def _refusal(refused: str, remedy: str, *, everywhere: bool = True) -> ConfigError:
    return ConfigError(
        f"outer_optimizer adasum cannot be used with {refused}",
        f"{remedy}, or use --outer-optimizer average or nesterov.",
        everywhere=everywhere,
    )


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
