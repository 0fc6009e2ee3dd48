"""What the plan says of sharded state."""

from hvdtrain.config import Config

_WHAT = {"optimizer": "the optimizer's state", "gradients": "the optimizer's state and the gradients"}


def describe(config: Config, workers: int) -> str:
    """Return how the state is divided among the workers; empty if it is not."""
    if config.shard == "none":
        return ""
    if workers == 1:
        return "one worker, which keeps all of it: sharding changes nothing"
    return f"{_WHAT[config.shard]}, over {workers} workers"
