"""What PyTorch's reducers share: a vector that travels by itself, and kinds of parameters."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.torch.state.model_state import Entry
from hvdtrain.config import Config
from hvdtrain.config.values import compression_of
from hvdtrain.errors import ConfigError

_ORDINARY = (torch.float32, torch.float64, torch.float16)


class Reducer(GradientReducer):
    """A reducer of PyTorch; see ``GradientReducer``."""

    def finish(
        self, gradients: list[torch.Tensor], vector: torch.Tensor | None = None
    ) -> tuple[list[torch.Tensor], Any]:
        """Collective. Return the sum of each gradient over workers; sum a vector in place, by itself."""
        if self._workers.size == 1:
            return list(gradients), vector
        if vector is None:
            return self._sum(gradients), None
        with summed_meanwhile(vector):
            return self._sum(gradients), vector


@contextmanager
def summed_meanwhile(vector: torch.Tensor) -> Iterator[None]:
    """Collective. Return a context at whose end a vector is summed in place, by a message of its own."""
    handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
    try:
        yield
    finally:
        hvd.synchronize(handle)


def check_kinds(trainable: Iterable[Entry], config: Config) -> None:
    """Check that what a config requests can be computed with the kinds of numbers that the parameters are."""
    options = {
        f"shard: {config.shard}": config.shard != "none",
        f"compression: {config.compression}": bool(compression_of(config.compression).keeps),
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
