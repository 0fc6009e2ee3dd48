"""What PyTorch's reducers share: a vector that travels by itself, and what is kept from step to step."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.backends.reduction import GradientReducer, Kept
from hvdtrain.backends.torch.reduction.broadcast import broadcast_tensors
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

    def broadcast(self, root: int) -> None:
        """Collective. Copy what the root keeps to every worker."""
        broadcast_tensors(((one.name, dense(one.tensor)) for one in self.kept()), root, label="reducer")

    def _read(self, kept: Kept) -> Any:
        tensor, size = kept.tensor, self._workers.size
        if kept.is_part and size > 1:
            hvd.allreduce_(dense(tensor), op=hvd.Sum, name=f"hvdtrain.{kept.portable_name}")
        array = np.array(tensor.detach().cpu().numpy(), order="C").reshape(kept.shape)
        if kept.is_part:
            tensor.div_(size)
        return array

    def _write(self, kept: Kept, array: Any) -> None:
        numbers = np.broadcast_to(np.asarray(array, np.float32), kept.shape).reshape(kept.tensor.shape)
        parts = self._workers.size if kept.is_part else 1
        kept.tensor.copy_(torch.from_numpy(np.array(numbers, order="C")).div_(parts))


@contextmanager
def summed_meanwhile(vector: torch.Tensor) -> Iterator[None]:
    """Collective. Return a context at whose end a vector is summed in place, by a message of its own."""
    handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
    try:
        yield
    finally:
        hvd.synchronize(handle)


def dense(matrix: torch.Tensor) -> torch.Tensor:
    """Return a matrix whose memory has no gaps so that it is contiguous: itself or its transpose."""
    return matrix if matrix.is_contiguous() else matrix.T


def check_kinds(trainable: Iterable[Entry], config: Config) -> None:
    """Check that what a config requests can be computed with the kinds of numbers that the parameters are.

    Raises:
        ConfigError: If it cannot, naming the parameter and the option.
    """
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
