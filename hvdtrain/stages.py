"""Which replica of the model a worker belongs to: with stages, several workers make up one."""

from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers


def replicas(workers: Workers, config: Config) -> int:
    """Return the number of replicas of the model, to which each step's samples are dealt."""
    return workers.size // config.stages


def replica(workers: Workers, config: Config) -> int:
    """Return the replica that this worker belongs to, from 0: it reads the samples that are dealt to it."""
    return workers.rank // config.stages


def speaks_for_replica(workers: Workers, config: Config) -> bool:
    """Return whether this worker counts and reports what all workers of its replica read: its first stage."""
    return workers.rank % config.stages == 0
