"""Losses and metrics by name, in PyTorch; ``tensorflow/objective/losses.py`` does the same for Keras.

Each takes (outputs, batch) and gives one value per sample, or values and weights per sample if targets can
be left out or have weights. Classes stand on the last axis of outputs, or on axis 1; values of a sequence or
an image are averaged within the sample, over the targets that count.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from hvdtrain.backends.objective.counting import (
    OF_METRICS,
    Counting,
    Weighted,
    check_class_weights,
    check_weighted,
    check_weights_fit,
)
from hvdtrain.backends.objective.logits import (
    bad_target,
    check_class_numbers,
    check_comparable,
    class_axis_of,
)
from hvdtrain.backends.objective.objective import check_per_sample, shape_of
from hvdtrain.errors import TaskError


class Values(NamedTuple):
    """What an objective gave for the samples of one micro-batch."""

    losses: Tensor  # (samples,), fp32 or fp64, with gradient
    loss_weights: Tensor | None  # (samples,), without gradient; None if the loss has no weights of its own
    # (numbers, samples), without gradient: for each name the values, times their weights; then the weights of
    # each name that has some. Their sums, weighted by sample, are reduced
    rows: Tensor


def as_arrays(value: Any) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the values that a loss or metric gave, and their weights if they have some."""
    parts = value if isinstance(value, Weighted) else (value, None)
    return tuple(None if p is None else torch.as_tensor(p).detach().double().cpu().numpy() for p in parts)  # type: ignore[return-value]


def check_values(given: Mapping[str, Any], samples: int) -> None:
    """Check the shapes of a loss, the first, and of metrics."""
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
    """Return values and weights of a loss, the first, and of metrics, for each sample."""
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


Batch = Mapping[str, Tensor]
PerSample = Tensor | Weighted
_NO_CLASS = -(1 << 31)  # as ignore_index it ignores nothing


def cross_entropy(
    outputs: Tensor,
    batch: Batch,
    label_smoothing: float = 0.0,
    counting: Counting = OF_METRICS,
    class_axis: int | None = None,
) -> PerSample:
    """Cross-entropy of logits (batch, ..., classes) with class numbers (batch, ...) or probabilities.

    The target is (1 - label_smoothing) * onehot + label_smoothing / classes. What a target's class weighs
    applies to the whole of its loss.
    """
    outputs, targets = classes_last("cross_entropy", outputs, batch["targets"], class_axis)
    classes, soft = outputs.shape[-1], _is_soft(outputs, targets)
    counted = None if soft else _counted(targets, counting)
    try:
        losses = F.cross_entropy(
            outputs.reshape(-1, classes),
            targets.reshape(-1, classes) if soft else targets.reshape(-1),
            ignore_index=_NO_CLASS if counted is None else counting.ignore_index,
            reduction="none",
            label_smoothing=label_smoothing,
        ).reshape(outputs.shape[:-1])
    except IndexError as error:
        raise bad_target(error) or error from None
    weights = counted
    if counting.class_weights is not None:
        check_class_weights(counting.class_weights, classes, soft)
        table = _table(counting.class_weights, targets.device)
        weights = _product(counted, table[_classes(targets, counted)])
    weights = _product(weights, _batch_weights("cross_entropy", losses, batch, counting))
    return _per_sample(losses, weights)


def binary_cross_entropy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> PerSample:
    """Cross-entropy of logits with targets in [0, 1]."""
    outputs, targets = _aligned("binary_cross_entropy", outputs, batch)
    losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    weights = _batch_weights("binary_cross_entropy", targets, batch, counting)
    return _per_sample(losses, _product(_counted(targets, counting), weights))


def mse(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> PerSample:
    """Mean squared error."""
    outputs, targets = _aligned("mse", outputs, batch)
    losses = F.mse_loss(outputs, targets, reduction="none")
    return _per_sample(losses, _batch_weights("mse", targets, batch, counting))


def mae(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> PerSample:
    """Mean absolute error."""
    outputs, targets = _aligned("mae", outputs, batch)
    losses = F.l1_loss(outputs, targets, reduction="none")
    return _per_sample(losses, _batch_weights("mae", targets, batch, counting))


def accuracy(
    outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS, class_axis: int | None = None
) -> PerSample:
    """Return whether the largest logit is the target's."""
    outputs, targets = classes_last("accuracy", outputs, batch["targets"], class_axis)
    if _is_soft(outputs, targets):
        return _per_sample((outputs.argmax(-1) == targets.argmax(-1)).float(), None)
    return _per_sample((outputs.argmax(-1) == targets).float(), _counted(targets, counting))


def top5_accuracy(
    outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS, class_axis: int | None = None
) -> PerSample:
    """Return whether the target's logit is among the five largest."""
    outputs, targets = classes_last("top5_accuracy", outputs, batch["targets"], class_axis)
    soft = _is_soft(outputs, targets)
    counted = None if soft else _counted(targets, counting)
    of_target = outputs.gather(-1, (targets.argmax(-1) if soft else _classes(targets, counted)).unsqueeze(-1))
    return _per_sample(((outputs > of_target).sum(-1) < 5).float(), counted)


def binary_accuracy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> PerSample:
    """Return whether the logit's sign agrees with the target, 0 or 1."""
    outputs, targets = _aligned("binary_accuracy", outputs, batch)
    return _per_sample(((outputs > 0) == (targets > 0.5)).float(), _counted(targets, counting))


NAMED = {
    function.__name__: function
    for function in (cross_entropy, binary_cross_entropy, mse, mae, accuracy, top5_accuracy, binary_accuracy)
}


def classes_last(
    name: str, outputs: Tensor, targets: Tensor, class_axis: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits with the classes on the last axis, and targets (batch, ...) or, soft, of their shape."""
    if outputs.dim() == 2 and targets.dim() == 1 and outputs.shape[1] > 1:
        return outputs, targets
    axis = class_axis_of(name, tuple(outputs.shape), tuple(targets.shape), class_axis)
    soft = outputs.dim() == targets.dim() and outputs.shape == targets.shape
    if soft:
        check_class_numbers(name, targets.is_floating_point(), tuple(targets.shape))
    outputs = outputs.movedim(axis, -1)
    return outputs, targets.movedim(axis, -1) if soft else targets.reshape(outputs.shape[:-1])


def _is_soft(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets are a probability for each class."""
    return targets.dim() == outputs.dim()


def _aligned(name: str, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    check_comparable(name, tuple(outputs.shape), tuple(targets.shape))
    return outputs.reshape(targets.shape), targets.to(outputs.dtype)


def _counted(targets: Tensor, counting: Counting) -> Tensor | None:
    """Return 1 for each target that counts and 0 for others; None if all of them do."""
    if targets.dim() == 1 and not counting.of_samples:
        return None
    return (targets != counting.ignore_index).float()


def _classes(targets: Tensor, counted: Tensor | None) -> Tensor:
    """Return the targets as class numbers, with 0 for those that do not count."""
    return targets if counted is None else targets * counted.long()


@cache
def _table(weights: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(weights, device=device)


def _batch_weights(name: str, targets: Tensor, batch: Batch, counting: Counting) -> Tensor | None:
    """Return the weights that a batch has, of the targets' rank; None if it has none."""
    if not (counting.batch_weights and "weights" in batch):
        return None
    weights = batch["weights"].float()
    check_weights_fit(name, tuple(weights.shape), tuple(targets.shape))
    return weights.reshape(*weights.shape, *[1] * (targets.dim() - weights.dim()))


def _product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the product of weights; None stands for weights that are all 1."""
    if one is None or other is None:
        return other if one is None else one
    return one * other


def _per_sample(values: Tensor, weights: Tensor | None) -> PerSample:
    """Return the mean within each sample: the weighted one with its weight if there are weights.

    The weight is a sum over axis 1, so that it does not depend on how far a batch is padded.
    """
    if values.dim() == 1:
        return values if weights is None else Weighted(values, weights)
    if weights is None:
        return values.flatten(1).mean(1)
    weights = weights.expand_as(values)
    sums, shares = (
        (part.flatten(2).mean(2) if part.dim() > 2 else part).sum(1) for part in (values * weights, weights)
    )
    return Weighted(sums / shares.where(shares > 0, 1.0), shares)
