"""How TensorFlow's gradients are summed over workers: one class for each way, chosen from a table."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.reduction.low_rank import has_warmup
from hvdtrain.backends.tensorflow.precision import LossScale
from hvdtrain.backends.tensorflow.reduction.all_reduce import AllReduce
from hvdtrain.backends.tensorflow.reduction.bfloat16 import BFloat16
from hvdtrain.backends.tensorflow.reduction.low_rank import LowRank
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.backends.tensorflow.traced_workers import Sized
from hvdtrain.config import Config
from hvdtrain.config.values import rank_of

Tensor = Any
Variable = Any


# by the config's compression: the workers, whether a loss scale has multiplied the gradients by their number
# -> the reducer
REDUCERS: dict[str, Callable[[Sized, bool], GradientReducer]] = {
    "none": AllReduce,
    "fp16": partial(AllReduce, fp16=True),
    "bf16": BFloat16,
}


def choose_reducer(
    config: Config, workers: Sized, fields: Iterable[Field] = (), loss_scale: LossScale | None = None
) -> GradientReducer:
    """Return the reducer that a config asks for.

    Args:
        config: the job's config; its ``compression`` and ``precision`` are used.
        workers: the job's workers.
        fields: the trainable parameters as portable arrays, of which low rank needs the shape.
        loss_scale: what multiplies the gradients, if something does.
    """
    rank = rank_of(config.compression)
    if rank is None:
        return REDUCERS[config.compression](workers, config.precision == "fp16")
    factor = None if loss_scale is None else (lambda: loss_scale.factor)
    return LowRank(workers, fields, rank, config.seed, factor=factor, has_warmup=has_warmup(config))
