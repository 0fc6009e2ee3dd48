"""Losses and metrics by name, in TensorFlow; ``torch/losses.py`` does the same for PyTorch.

Each takes (outputs, batch) and gives one value per sample, or values and weights per sample if targets can
be left out or have weights. Classes stand on the last axis of outputs, or on axis 1; values of a sequence or
an image are averaged within the sample, over the targets that count.
"""

from collections.abc import Mapping
from typing import Any

import tensorflow as tf

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

Tensor = Any
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
    weights, soft = _counted(outputs, targets, counting), _is_soft(outputs, targets)
    if soft:
        losses = tf.nn.softmax_cross_entropy_with_logits(targets, outputs)
    else:
        targets = targets * tf.cast(weights > 0, targets.dtype)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
    if label_smoothing:
        of_all = tf.reduce_logsumexp(outputs, -1) - tf.reduce_mean(outputs, -1)
        losses = (1 - label_smoothing) * losses + label_smoothing * of_all
    if counting.class_weights is not None:
        check_class_weights(counting.class_weights, outputs.shape[-1], soft)
        weights = weights * tf.gather(tf.constant(counting.class_weights, tf.float32), targets)
    weights = _times_batch_weights("cross_entropy", weights, batch, counting)
    return _weighted(losses, weights)


def binary_cross_entropy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Weighted:
    """Cross-entropy of logits with targets in [0, 1]."""
    outputs, targets = _aligned("binary_cross_entropy", outputs, batch)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, outputs)
    weights = tf.cast(tf.not_equal(targets, counting.ignore_index), tf.float32)
    return _weighted(losses, _times_batch_weights("binary_cross_entropy", weights, batch, counting))


def mse(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Tensor | Weighted:
    """Mean squared error."""
    outputs, targets = _aligned("mse", outputs, batch)
    return _of_all("mse", tf.math.squared_difference(outputs, targets), batch, counting)


def mae(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Tensor | Weighted:
    """Mean absolute error."""
    outputs, targets = _aligned("mae", outputs, batch)
    return _of_all("mae", tf.abs(outputs - targets), batch, counting)


def accuracy(
    outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS, class_axis: int | None = None
) -> Weighted:
    """Return whether the largest logit is the target's."""
    outputs, targets = classes_last("accuracy", outputs, batch["targets"], class_axis)
    numbers = _class_numbers(outputs, targets)
    largest = tf.argmax(outputs, -1, output_type=numbers.dtype)
    right = tf.cast(tf.equal(largest, numbers), tf.float32)
    return _weighted(right, _counted(outputs, targets, counting))


def top5_accuracy(
    outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS, class_axis: int | None = None
) -> Weighted:
    """Return whether the target's logit is among the five largest."""
    outputs, targets = classes_last("top5_accuracy", outputs, batch["targets"], class_axis)
    weights, numbers = _counted(outputs, targets, counting), _class_numbers(outputs, targets)
    numbers = numbers * tf.cast(weights > 0, numbers.dtype)
    of_target = tf.gather(outputs, numbers, batch_dims=numbers.shape.rank)[..., None]
    larger = tf.reduce_sum(tf.cast(outputs > of_target, tf.int32), -1)
    return _weighted(tf.cast(larger < 5, tf.float32), weights)


def binary_accuracy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Weighted:
    """Return whether the logit's sign agrees with the target, 0 or 1."""
    outputs, targets = _aligned("binary_accuracy", outputs, batch)
    counted = tf.not_equal(targets, counting.ignore_index)
    right = tf.cast(tf.equal(outputs > 0, targets > 0.5), tf.float32)
    return _weighted(right, tf.cast(counted, tf.float32))


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
    if outputs.shape.rank is None or (outputs.shape.rank == 2 and targets.shape.rank == 1):
        return outputs, targets
    axis = class_axis_of(name, tuple(outputs.shape), tuple(targets.shape), class_axis)
    soft = outputs.shape.rank == targets.shape.rank and outputs.shape == targets.shape
    if soft:
        check_class_numbers(name, targets.dtype.is_floating, tuple(targets.shape))
    outputs = _moved_to_last(outputs, axis)
    if soft:
        return outputs, _moved_to_last(targets, axis)
    return outputs, targets if targets.shape.rank < outputs.shape.rank else tf.squeeze(targets, -1)


def _moved_to_last(values: Tensor, axis: int) -> Tensor:
    rest = [i for i in range(values.shape.rank) if i != axis]
    return values if axis == values.shape.rank - 1 else tf.transpose(values, [*rest, axis])


def _is_soft(outputs: Tensor, targets: Tensor) -> bool:
    """Return whether targets are a probability for each class."""
    return bool(targets.shape.rank == outputs.shape.rank)


def _class_numbers(outputs: Tensor, targets: Tensor) -> Tensor:
    return tf.argmax(targets, -1) if _is_soft(outputs, targets) else targets


def _counted(outputs: Tensor, targets: Tensor, counting: Counting) -> Tensor:
    """Return 1 for each target that counts and 0 for the others; probabilities always count."""
    if _is_soft(outputs, targets):
        return tf.ones_like(targets[..., 0], tf.float32)
    return tf.cast(tf.not_equal(targets, counting.ignore_index), tf.float32)


def _aligned(name: str, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    check_comparable(name, tuple(outputs.shape), tuple(targets.shape))
    return tf.reshape(outputs, tf.shape(targets)), tf.cast(targets, outputs.dtype)


def _times_batch_weights(name: str, weights: Tensor, batch: Batch, counting: Counting) -> Tensor:
    """Return the targets' weights times those that the batch has, per sample or per target, if it has any."""
    if not (counting.batch_weights and "weights" in batch):
        return weights
    given = tf.cast(batch["weights"], tf.float32)
    if check_weights_fit(name, tuple(given.shape), tuple(weights.shape)):
        return weights * given
    return weights * tf.reshape(given, (-1, *[1] * (weights.shape.rank - 1)))


def _of_all(name: str, values: Tensor, batch: Batch, counting: Counting) -> Tensor | Weighted:
    """Return values of which none can be left out, per sample; with weights if the batch has some."""
    if not (counting.batch_weights and "weights" in batch):
        return _per_sample(values)
    weights = tf.ones_like(values, dtype=tf.float32)
    return _weighted(values, _times_batch_weights(name, weights, batch, counting))


def _weighted(values: Tensor, weights: Tensor) -> Weighted:
    """Return the weighted mean within each sample, and the mean of its weights."""
    if values.shape.rank == 1:
        return Weighted(values, weights)
    parts, shares = _per_sample(values * tf.cast(weights, values.dtype)), _per_sample(weights)
    return Weighted(parts / tf.cast(tf.where(shares > 0, shares, 1.0), parts.dtype), shares)


def _per_sample(values: Tensor) -> Tensor:
    return values if values.shape.rank == 1 else tf.reduce_mean(values, list(range(1, values.shape.rank)))
