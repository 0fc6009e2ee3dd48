"""How PyTorch's gradients are summed over workers: one class for each way, chosen from a table."""

from collections.abc import Callable, Iterable
from functools import partial

import torch

from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.reduction.low_rank import has_warmup
from hvdtrain.backends.torch.precision import LossScale
from hvdtrain.backends.torch.reduction.all_reduce import AllReduce
from hvdtrain.backends.torch.reduction.bfloat16 import BFloat16
from hvdtrain.backends.torch.reduction.low_rank import LowRank
from hvdtrain.backends.torch.state.model_state import Entry, Field
from hvdtrain.backends.workers import Sized
from hvdtrain.config import Config
from hvdtrain.config.values import rank_of
from hvdtrain.errors import ConfigError

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
        fields: the trainable parameters as portable arrays, of which low rank needs the layout.
        loss_scale: what multiplies the gradients, if something does.
    """
    rank = rank_of(config.compression)
    if rank is None:
        return REDUCERS[config.compression](workers, config.precision == "fp16")
    factor = (lambda: 1.0) if loss_scale is None else (lambda: loss_scale.factor)
    return LowRank(workers, fields, rank, config.seed, factor=factor, has_warmup=has_warmup(config))


_ORDINARY = (torch.float32, torch.float64, torch.float16)


def check_kinds(trainable: Iterable[Entry], config: Config) -> None:
    """Check that what a config asks for can be computed with the kinds of numbers that the parameters are.

    Raises:
        ConfigError: If it cannot, naming the parameter and the option.
    """
    options = {
        f"shard: {config.shard}": config.shard != "none",
        f"compression: {config.compression}": rank_of(config.compression) is not None,
        f"optimizer: {config.optimizer}": config.optimizer in ("lars", "lamb"),
    }
    option = next((name for name, is_given in options.items() if is_given), None)
    entry = next((entry for entry in trainable if entry.tensor.dtype not in _ORDINARY), None)
    if option is not None and entry is not None:
        kind = str(entry.tensor.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{option}: the model's parameter {entry.path} is {kind}; this takes real numbers in fp32, fp64 "
            "or fp16",
            "Leave the option out, or convert the model: model.float().",
        )
