"""Sharded state: what both frameworks check before a job begins, and what its plan says."""

from typing import Any

from hvdtrain.agreement import Workers
from hvdtrain.backends.named_optimizers import own_optimizer_method
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError
from hvdtrain.frameworks import FRAMEWORKS


def check_sharding(task: Any, config: Config, workers: Workers) -> None:
    """Check that a job's state can be sharded, if its config asks for it.

    Raises:
        ConfigError: naming what it does not go with.
    """
    if config.shard == "none":
        return
    row = FRAMEWORKS[config.framework]
    if hasattr(task, row.step_method):
        refused = f"the task's own {row.step_method}: it updates whole parameters itself"
    elif method := own_optimizer_method(task, config):
        refused = (
            f"the task's own {method}(): whether it computes the same if each worker gives it a part of the "
            "parameters is not known"
        )
    elif workers.is_elastic:
        refused = "an elastic job: the part of the state that a worker keeps is lost with it"
    else:
        return
    raise ConfigError(
        f"shard {config.shard} cannot be used with {refused}", "Leave shard out.", everywhere=True
    )
