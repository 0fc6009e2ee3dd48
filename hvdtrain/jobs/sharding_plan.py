"""What the plan says of sharded state."""

import math

from hvdtrain.backends.base import ModelInfo
from hvdtrain.backends.sharding import sharded_numbers
from hvdtrain.config import Config

_NUMBER_BYTES = 4
_WHAT = {"optimizer": "the optimizer's state", "gradients": "the optimizer's state and the gradients"}


def describe(config: Config, model: ModelInfo, workers: int) -> str:
    """Return how the state is divided among the workers and what that saves; empty if it is not."""
    if config.shard == "none":
        return ""
    if workers == 1:
        return "one worker, which keeps all of it: sharding changes nothing"
    numbers = sum(math.prod(shape) for shape in model.parameter_shapes.values())
    saved_bytes = numbers * _NUMBER_BYTES * sharded_numbers(config) * (1 - 1 / workers)
    return f"{_WHAT[config.shard]}, over {workers} workers; saves about {saved_bytes / 1e6:,.0f} MB each"
