"""Losses and metrics by name, in TensorFlow; ``torch/losses.py`` does the same for PyTorch.

Each takes (outputs, batch) and gives one value per sample. Classes stand on the last axis of
outputs; values of a sequence or an image are averaged within the sample.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from hvdtrain.backends.objective import check_comparable

Tensor = Any
Batch = Mapping[str, Tensor]


def cross_entropy(outputs: Tensor, batch: Batch, label_smoothing: float = 0.0) -> Tensor:
    """Cross-entropy of logits (batch, ..., classes) with class numbers (batch, ...).

    The target is (1 - label_smoothing) * onehot + label_smoothing / classes.
    """
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["targets"], outputs)
    if label_smoothing:
        of_all = tf.reduce_logsumexp(outputs, -1) - tf.reduce_mean(outputs, -1)
        losses = (1 - label_smoothing) * losses + label_smoothing * of_all
    return _per_sample(losses)


def binary_cross_entropy(outputs: Tensor, batch: Batch) -> Tensor:
    """Cross-entropy of logits with targets in [0, 1]."""
    outputs, targets = _aligned("binary_cross_entropy", outputs, batch)
    return _per_sample(tf.nn.sigmoid_cross_entropy_with_logits(targets, outputs))


def mse(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean squared error."""
    outputs, targets = _aligned("mse", outputs, batch)
    return _per_sample(tf.math.squared_difference(outputs, targets))


def mae(outputs: Tensor, batch: Batch) -> Tensor:
    """Mean absolute error."""
    outputs, targets = _aligned("mae", outputs, batch)
    return _per_sample(tf.abs(outputs - targets))


def accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """Return whether the largest logit is the target's."""
    targets = batch["targets"]
    largest = tf.argmax(outputs, -1, output_type=targets.dtype)
    return _per_sample(tf.cast(tf.equal(largest, targets), tf.float32))


def top5_accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """Return whether the target's logit is among the five largest."""
    targets = batch["targets"]
    of_target = tf.gather(outputs, targets, batch_dims=targets.shape.rank)[..., None]
    larger = tf.reduce_sum(tf.cast(outputs > of_target, tf.int32), -1)
    return _per_sample(tf.cast(larger < 5, tf.float32))


def binary_accuracy(outputs: Tensor, batch: Batch) -> Tensor:
    """Return whether the logit's sign agrees with the target, 0 or 1."""
    outputs, targets = _aligned("binary_accuracy", outputs, batch)
    return _per_sample(tf.cast(tf.equal(outputs > 0, targets > 0.5), tf.float32))


NAMED = {
    function.__name__: function
    for function in (cross_entropy, binary_cross_entropy, mse, mae, accuracy, top5_accuracy, binary_accuracy)
}


def _aligned(name: str, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    check_comparable(name, tuple(outputs.shape), tuple(targets.shape))
    return tf.reshape(outputs, tf.shape(targets)), tf.cast(targets, outputs.dtype)


def _per_sample(values: Tensor) -> Tensor:
    return values if values.shape.rank == 1 else tf.reduce_mean(values, list(range(1, values.shape.rank)))
