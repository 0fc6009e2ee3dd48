"""Losses and metrics by name, in PyTorch; ``tensorflow/losses.py`` does the same for Keras.

Each takes (outputs, batch) and gives one value per sample, or values and weights per sample if targets can
be left out or have weights. Classes stand on the last axis of outputs, or on axis 1; values of a sequence or
an image are averaged within the sample, over the targets that count.
"""

from collections.abc import Mapping
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

from hvdtrain.backends.objective import (
    OF_METRICS,
    Counting,
    Weighted,
    check_class_numbers,
    check_class_weights,
    check_comparable,
    check_weights_fit,
    class_axis_of,
)

Batch = Mapping[str, Tensor]


def cross_entropy(
    outputs: Tensor,
    batch: Batch,
    label_smoothing: float = 0.0,
    counting: Counting = OF_METRICS,
    class_axis: int | None = None,
) -> Weighted:
    """Cross-entropy of logits (batch, ..., classes) with class numbers (batch, ...) or probabilities.

    The target is (1 - label_smoothing) * onehot + label_smoothing / classes. What a target's class weighs
    applies to the whole of its loss.
    """
    outputs, targets = classes_last("cross_entropy", outputs, batch["targets"], class_axis)
    classes, soft = outputs.shape[-1], _is_soft(outputs, targets)
    losses = F.cross_entropy(
        outputs.reshape(-1, classes),
        targets.reshape(-1, classes) if soft else targets.reshape(-1),
        ignore_index=-100 if soft else counting.ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    weights = _counted(outputs, targets, counting)
    if counting.class_weights is not None:
        check_class_weights(counting.class_weights, classes, soft)
        of_class = _table(counting.class_weights, targets.device)
        weights = weights * of_class[targets * (targets != counting.ignore_index)]
    weights = _times_batch_weights("cross_entropy", weights, batch, counting)
    return _weighted(losses.reshape(outputs.shape[:-1]), weights)


def binary_cross_entropy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Weighted:
    """Cross-entropy of logits with targets in [0, 1]."""
    outputs, targets = _aligned("binary_cross_entropy", outputs, batch)
    losses = F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    weights = (targets != counting.ignore_index).float()
    return _weighted(losses, _times_batch_weights("binary_cross_entropy", weights, batch, counting))


def mse(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Tensor | Weighted:
    """Mean squared error."""
    outputs, targets = _aligned("mse", outputs, batch)
    return _of_all("mse", F.mse_loss(outputs, targets, reduction="none"), batch, counting)


def mae(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Tensor | Weighted:
    """Mean absolute error."""
    outputs, targets = _aligned("mae", outputs, batch)
    return _of_all("mae", F.l1_loss(outputs, targets, reduction="none"), batch, counting)


def accuracy(
    outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS, class_axis: int | None = None
) -> Weighted:
    """Return whether the largest logit is the target's."""
    outputs, targets = classes_last("accuracy", outputs, batch["targets"], class_axis)
    right = outputs.argmax(-1) == _class_numbers(outputs, targets)
    return _weighted(right.float(), _counted(outputs, targets, counting))


def top5_accuracy(
    outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS, class_axis: int | None = None
) -> Weighted:
    """Return whether the target's logit is among the five largest."""
    outputs, targets = classes_last("top5_accuracy", outputs, batch["targets"], class_axis)
    weights = _counted(outputs, targets, counting)
    numbers = _class_numbers(outputs, targets) * (weights > 0)
    of_target = outputs.gather(-1, numbers.unsqueeze(-1))
    return _weighted(((outputs > of_target).sum(-1) < 5).float(), weights)


def binary_accuracy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Weighted:
    """Return whether the logit's sign agrees with the target, 0 or 1."""
    outputs, targets = _aligned("binary_accuracy", outputs, batch)
    counted = targets != counting.ignore_index
    return _weighted(((outputs > 0) == (targets > 0.5)).float(), counted.float())


NAMED = {
    function.__name__: function
    for function in (cross_entropy, binary_cross_entropy, mse, mae, accuracy, top5_accuracy, binary_accuracy)
}


def classes_last(
    name: str, outputs: Tensor, targets: Tensor, class_axis: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits with the classes on the last axis, and targets (batch, ...) or, soft, of their shape.

    Args:
        name: of the loss or metric, for messages.
        outputs: logits with the classes on the last axis or on axis 1.
        targets: class numbers, or a probability for each class.
        class_axis: the task's; found by the shapes if None.

    Raises:
        TaskError: If the shapes do not fit.
    """
    if outputs.dim() == 2 and targets.dim() == 1:
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


def _class_numbers(outputs: Tensor, targets: Tensor) -> Tensor:
    return targets.argmax(-1) if _is_soft(outputs, targets) else targets


def _counted(outputs: Tensor, targets: Tensor, counting: Counting) -> Tensor:
    """Return 1 for each target that counts and 0 for the others; probabilities always count."""
    if _is_soft(outputs, targets):
        return torch.ones_like(targets[..., 0], dtype=torch.float32)
    return (targets != counting.ignore_index).float()


def _aligned(name: str, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    check_comparable(name, tuple(outputs.shape), tuple(targets.shape))
    return outputs.reshape(targets.shape), targets.to(outputs.dtype)


@cache
def _table(weights: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(weights, device=device)


def _times_batch_weights(name: str, weights: Tensor, batch: Batch, counting: Counting) -> Tensor:
    """Return the targets' weights times those that the batch has, per sample or per target, if it has any."""
    if not (counting.batch_weights and "weights" in batch):
        return weights
    given = batch["weights"].float()
    if check_weights_fit(name, tuple(given.shape), tuple(weights.shape)):
        return weights * given
    return weights * given.reshape(-1, *[1] * (weights.dim() - 1))


def _of_all(name: str, values: Tensor, batch: Batch, counting: Counting) -> Tensor | Weighted:
    """Return values of which none can be left out, per sample; with weights if the batch has some."""
    if not (counting.batch_weights and "weights" in batch):
        return _per_sample(values)
    weights = torch.ones_like(values, dtype=torch.float32)
    return _weighted(values, _times_batch_weights(name, weights, batch, counting))


def _weighted(values: Tensor, weights: Tensor) -> Weighted:
    """Return the weighted mean within each sample, and the mean of its weights."""
    if values.dim() == 1:
        return Weighted(values, weights)
    parts, shares = _per_sample(values * weights), _per_sample(weights)
    return Weighted(parts / shares.where(shares > 0, 1.0), shares)


def _per_sample(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)
