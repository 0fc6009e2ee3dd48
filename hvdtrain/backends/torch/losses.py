"""Losses and metrics by name, in PyTorch; ``tensorflow/losses.py`` does the same for Keras.

Each takes (outputs, batch) and gives one value per sample, or values and weights per sample if targets can
be left out or have weights. Classes stand on the last axis of outputs; values of a sequence or an image are
averaged within the sample, over the targets that count.
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
    check_class_weights,
    check_comparable,
    check_weights_fit,
)

Batch = Mapping[str, Tensor]


def cross_entropy(
    outputs: Tensor, batch: Batch, label_smoothing: float = 0.0, counting: Counting = OF_METRICS
) -> Weighted:
    """Cross-entropy of logits (batch, ..., classes) with class numbers (batch, ...).

    The target is (1 - label_smoothing) * onehot + label_smoothing / classes. What a target's class weighs
    applies to the whole of its loss.
    """
    targets = batch["targets"]
    losses = F.cross_entropy(
        outputs.reshape(-1, outputs.shape[-1]),
        targets.reshape(-1),
        ignore_index=counting.ignore_index,
        reduction="none",
        label_smoothing=label_smoothing,
    )
    counted = targets != counting.ignore_index
    weights = counted.float()
    if counting.class_weights is not None:
        check_class_weights(counting.class_weights, outputs.shape[-1])
        weights = weights * _table(counting.class_weights, targets.device)[targets * counted]
    weights = _times_batch_weights("cross_entropy", weights, batch, counting)
    return _weighted(losses.reshape(targets.shape), weights)


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


def accuracy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Weighted:
    """Return whether the largest logit is the target's."""
    targets = batch["targets"]
    return _weighted((outputs.argmax(-1) == targets).float(), (targets != counting.ignore_index).float())


def top5_accuracy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Weighted:
    """Return whether the target's logit is among the five largest."""
    targets = batch["targets"]
    counted = targets != counting.ignore_index
    of_target = outputs.gather(-1, (targets * counted).unsqueeze(-1))
    return _weighted(((outputs > of_target).sum(-1) < 5).float(), counted.float())


def binary_accuracy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Weighted:
    """Return whether the logit's sign agrees with the target, 0 or 1."""
    outputs, targets = _aligned("binary_accuracy", outputs, batch)
    counted = targets != counting.ignore_index
    return _weighted(((outputs > 0) == (targets > 0.5)).float(), counted.float())


NAMED = {
    function.__name__: function
    for function in (cross_entropy, binary_cross_entropy, mse, mae, accuracy, top5_accuracy, binary_accuracy)
}


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
