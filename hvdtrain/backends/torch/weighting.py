"""Values with weights of their own in PyTorch; ``tensorflow/weighting.py`` does the same for TensorFlow."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.backends.objective.counting import Weighted, check_weighted
from hvdtrain.backends.objective.objective import check_per_sample, shape_of
from hvdtrain.errors import TaskError


class Values(NamedTuple):
    """What an objective gave for the samples of one micro-batch.

    Attributes:
        losses: (samples,), fp32 or fp64, with gradient.
        loss_weights: (samples,), without gradient; None if the loss has no weights of its own.
        rows: (numbers, samples), without gradient: for each name the values, times their weights; then
            the weights of each name that has some. Their sums, weighted by sample, are reduced.
    """

    losses: Tensor
    loss_weights: Tensor | None
    rows: Tensor


def as_arrays(value: Any) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the values that a loss or metric gave, and their weights if they have some."""
    parts = value if isinstance(value, Weighted) else (value, None)
    return tuple(None if p is None else torch.as_tensor(p).detach().double().cpu().numpy() for p in parts)  # type: ignore[return-value]


def check_values(given: Mapping[str, Any], samples: int) -> None:
    """Check the shapes of a loss, the first, and of metrics.

    Raises:
        TaskError: naming the one that has another, or a loss whose weights have a gradient.
    """
    for index, (name, value) in enumerate(given.items()):
        what = name if index else "the loss"
        if not isinstance(value, Weighted):
            check_per_sample(what, shape_of(what, value), samples)
            continue
        weights = torch.as_tensor(value.weights)
        check_weighted(what, tuple(value.values.shape), tuple(weights.shape), samples)
        if not index and weights.requires_grad:
            raise TaskError(
                f"the weights of {what} depend on the model's parameters; no gradient flows through weights",
                "Give weights.detach(), or multiply the values and return them without Weighted.",
            )


def weigh(given: Mapping[str, Any], samples: int, kind: torch.dtype) -> Values:
    """Return values and weights of a loss, the first, and of metrics, for each sample.

    A batch's mean becomes the value of each of its samples, with an equal part of the weight.

    Args:
        given: the loss and the metrics.
        samples: number of samples.
        kind: the type of the result.
    """
    losses: Tensor | None = None
    loss_weights: Tensor | None = None
    rows, weight_rows = [], []
    for value in given.values():
        weights: Tensor | None = None
        if isinstance(value, Weighted):
            values = value.values.to(kind)
            weights = torch.as_tensor(value.weights, dtype=kind, device=values.device).detach()
            if values.dim() == 0:
                values, weights = values.expand(samples), (weights / samples).expand(samples)
            weight_rows.append(weights)
        else:
            values = value.to(kind)
        if losses is None:
            losses, loss_weights = values, weights
        rows.append(values.detach() if weights is None else values.detach() * weights)
    assert losses is not None  # a loss is the first
    return Values(losses, loss_weights, torch.stack(rows + weight_rows))
