"""Losses and metrics by name, in PyTorch; ``tensorflow/losses.py`` does the same for Keras.

Each takes (outputs, batch) and gives one value per sample. Classes stand on the last axis of
outputs; values of a sequence or an image are averaged within the sample.
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from hvdtrain.backends.objective import check_comparable

Batch = Mapping[str, Tensor]


def cross_entropy(outputs: Tensor, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits (batch, ..., classes) with class numbers (batch, ...).

    The target is (1 - label_smoothing) * onehot + label_smoothing / classes.
    """
    targets = batch["targets"]
    losses = F.cross_entropy(
        outputs.reshape(-1, outputs.shape[-1]),
        targets.reshape(-1),
        reduction="none",
        label_smoothing=label_smoothing,
    )
    return _per_sample(losses.reshape(targets.shape))


def binary_cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of logits with targets in [0, 1]."""
    outputs, targets = _aligned("binary_cross_entropy", outputs, batch)
    return _per_sample(F.binary_cross_entropy_with_logits(outputs, targets, reduction="none"))


def mse(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean squared error."""
    outputs, targets = _aligned("mse", outputs, batch)
    return _per_sample(F.mse_loss(outputs, targets, reduction="none"))


def mae(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean absolute error."""
    outputs, targets = _aligned("mae", outputs, batch)
    return _per_sample(F.l1_loss(outputs, targets, reduction="none"))


def accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """Return whether the largest logit is the target's."""
    return _per_sample((outputs.argmax(-1) == batch["targets"]).float())


def top5_accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """Return whether the target's logit is among the five largest."""
    of_target = outputs.gather(-1, batch["targets"].unsqueeze(-1))
    return _per_sample(((outputs > of_target).sum(-1) < 5).float())


def binary_accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """Return whether the logit's sign agrees with the target, 0 or 1."""
    outputs, targets = _aligned("binary_accuracy", outputs, batch)
    return _per_sample(((outputs > 0) == (targets > 0.5)).float())


NAMED = {
    function.__name__: function
    for function in (cross_entropy, binary_cross_entropy, mse, mae, accuracy, top5_accuracy, binary_accuracy)
}


def _aligned(name: str, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    check_comparable(name, tuple(outputs.shape), tuple(targets.shape))
    return outputs.reshape(targets.shape), targets.to(outputs.dtype)


def _per_sample(values: Tensor) -> Tensor:
    return values if values.dim() == 1 else values.flatten(1).mean(1)
