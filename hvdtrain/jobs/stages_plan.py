"""What the plan says of a split model."""

from collections.abc import Sequence

from hvdtrain.backends.pipeline.schedule import bubble
from hvdtrain.config import Config
from hvdtrain.storage.text import counted

_LOW = 0.2  # part of a step in which a stage waits, from which on more micro-batches are proposed


def describe(config: Config, workers: int, stages: Sequence[str]) -> str:
    """Return how the model is divided, and how long the stages wait, in lines; empty if it is not.

    Args:
        config: the resolved config.
        workers: number of workers.
        stages: what each stage has, in words.
    """
    if config.stages == 1:
        return ""
    idle = bubble(config.stages, config.accumulate)
    replicas = counted(workers // config.stages, "replica")
    micro_batches = "1 micro-batch" if config.accumulate == 1 else f"{config.accumulate:,} micro-batches"
    more = 4 * config.stages
    advice = (
        f"; with --accumulate {more}, {bubble(config.stages, more):.0%}"
        if idle > _LOW and config.accumulate < more
        else ""
    )
    first = (
        f"{replicas} of {config.stages} stages; with {micro_batches} in a step, each stage waits {idle:.0%} "
        f"of it if all take equally long{advice}"
    )
    return "\n".join([first, *stages])
