"""PyTorch's optimizers over a part of the parameters, and the moving average of that part."""

from collections.abc import Iterator
from contextlib import contextmanager

import horovod.torch as hvd
import torch

from hvdtrain.backends.torch.reduction.sharded_parameters import OwnSegment, ShardedParameters
from hvdtrain.backends.torch.state.ema import ExponentialMovingAverage
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.steps.optimizers import LAMB, LARS, Group, Tensors
from hvdtrain.backends.workers import peer_errors
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers


def shard_optimizer(optimizer: torch.optim.Optimizer, shards: ShardedParameters | None) -> None:
    """Let an optimizer of hvdtrain's that has made no slots yet update this worker's segments.

    Its groups stay, also those of which this worker owns nothing.

    Args:
        optimizer: the optimizer, over the whole parameters.
        shards: the parameters; None if each worker updates all of them.
    """
    if shards is None:
        return
    owned: dict[int, list[OwnSegment]] = {}
    for segment in shards.segments:
        owned.setdefault(id(segment.entry.tensor), []).append(segment)
    for group in optimizer.param_groups:
        parameters = group["params"]
        if "parts" in group:
            _cut_parts(group, owned)
        group["params"] = [s.tensor for parameter in parameters for s in owned.get(id(parameter), ())]
    if isinstance(optimizer, LARS | LAMB):
        optimizer.norms = SharedNorms(shards.workers)


def _cut_parts(group: Group, owned: dict[int, list[OwnSegment]]) -> None:
    """Divide the parts that have norms of their own as the parameters are divided, and number them."""
    numbers, cut, count = [], [], 0
    for parameter, parts in zip(group["params"], group["parts"], strict=False):
        if len(parts) > 1 and not parameter.is_contiguous():
            raise TaskError(
                f"a parameter of shape {tuple(parameter.shape)} holds {len(parts)} matrices that do not lie "
                "one after the other in memory, and with shard their norms cannot be computed",
                "Make it contiguous, leave shard out, or use adamw or sgd.",
            )
        row = parameter.numel() // max(1, len(parameter))
        for segment in owned.get(id(parameter), ()):
            own, its_numbers = [], []
            for number, (start, stop) in enumerate(parts, count):
                first, last = max(start * row, segment.begin), min(stop * row, segment.end)
                if first < last:
                    own.append((first - segment.begin, last - segment.begin))
                    its_numbers.append(number)
            cut.append(tuple(own))
            numbers.append(its_numbers)
        count += len(parts)
    group["parts"], group["part_numbers"], group["part_count"] = tuple(cut), tuple(numbers), count


class SharedNorms:
    """The norms of parameters of which each worker has a part.

    Args:
        workers: the job's workers.
    """

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def __call__(self, group: Group, weights: Tensors, others: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective. Return the norms over all workers of what this worker has parts of.

        Args:
            group: the optimizer's group of parameters, which all workers have.
            weights: this worker's parts of the weights.
            others: those of the gradients or of the updates.
        """
        squares = torch.zeros(2, group["part_count"], dtype=torch.float64)
        of_parameters = zip(group["params"], group["part_numbers"], strict=True)
        own = [number for p, numbers in of_parameters if p.grad is not None for number in numbers]
        numbers = torch.tensor(own, dtype=torch.int64)
        if weights:
            for row, tensors in zip(squares, (weights, others), strict=True):
                row.index_add_(0, numbers, _squared_norms(tensors).cpu())
        squares = hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.norms")
        kind = weights[0] if weights else squares
        found = squares.sqrt()[:, numbers].to(dtype=kind.dtype, device=kind.device)
        return found[0], found[1]


def _squared_norms(tensors: Tensors) -> torch.Tensor:
    """Return the squares of the norms of tensors, in fp64."""
    return torch.stack([tensor.to(torch.float64).square().sum() for tensor in tensors])


class ShardedMovingAverage(ExponentialMovingAverage):
    """The moving average of this worker's part of the weights.

    Args:
        model: the model's tensors.
        decay: of the average, per step; None where there is none.
        shards: the parameters.

    Attributes:
        is_kept: whether there is a decay.
        of_segment: the average of each segment, by its identity.
    """

    def __init__(self, model: ModelState, decay: float | None, shards: ShardedParameters) -> None:
        super().__init__(model, None)
        self.decay = decay or 0.0
        self._shards = shards
        segments = shards.segments if decay is not None else []
        self._weights = [segment.tensor for segment in segments]
        self._averages = [weight.clone() for weight in self._weights]
        self._paths = [f"{segment.entry.path}.{segment.begin}" for segment in segments]
        self.of_segment = {
            id(segment): average for segment, average in zip(segments, self._averages, strict=True)
        }
        self.is_kept = decay is not None

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Collective. Return a context in which the model's weights are the averages of all workers."""
        if not self.is_kept:
            yield
            return
        entries = [entry for bucket in self._shards.buckets for entry in bucket.entries]
        own = [entry.tensor.detach().clone() for entry in entries]
        with peer_errors():
            self._shards.gather(lambda segment: self.of_segment[id(segment)], "ema")
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([entry.tensor.detach() for entry in entries], own)


def make_ema(
    model: ModelState, decay: float | None, shards: ShardedParameters | None
) -> ExponentialMovingAverage:
    """Return the moving average of the weights; of this worker's part if they are sharded.

    Args:
        model: the model's tensors.
        decay: of the average, per step; None where there is none.
        shards: the parameters; None if each worker updates all of them.
    """
    if shards is None:
        return ExponentialMovingAverage(model, decay)
    return ShardedMovingAverage(model, decay, shards)
