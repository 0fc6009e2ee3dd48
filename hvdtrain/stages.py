"""Which replica of the model a worker belongs to: with stages, several workers make up one."""

from hvdtrain.agreement import Workers
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError

SPEED_OF_STAGES = "metrics.jsonl has the speed of a training with stages."


def replicas(workers: Workers, config: Config) -> int:
    """Return the number of replicas of the model, to which each step's samples are dealt."""
    return workers.size // config.stages


def replica(workers: Workers, config: Config) -> int:
    """Return the replica that this worker belongs to, from 0: it reads the samples that are dealt to it."""
    return workers.rank // config.stages


def speaks_for_replica(workers: Workers, config: Config) -> bool:
    """Return whether this worker counts and reports what all workers of its replica read: its first stage."""
    return workers.rank % config.stages == 0


def check_not_split(config: Config, command: str, reason: str, remedy: str = "") -> None:
    """Check that a job's model is not split into stages.

    Args:
        config: the resolved config.
        command: what cannot be done then.
        reason: why, in words.
        remedy: what the user may do besides leaving stages out.

    Raises:
        ConfigError: If it is.
    """
    if config.stages > 1:
        raise ConfigError(
            f"stages {config.stages}: {command} {reason}",
            f"Leave stages out for {command}. {remedy}".strip(),
            everywhere=True,
        )
