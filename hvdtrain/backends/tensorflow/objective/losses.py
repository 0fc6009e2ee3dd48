"""Losses and metrics by name, in TensorFlow; ``torch/objective/losses.py`` does the same for PyTorch.

Each takes (outputs, batch) and gives one value per sample, or values and weights per sample if targets can
be left out or have weights. Classes stand on the last axis of outputs, or on axis 1; values of a sequence or
an image are averaged within the sample, over the targets that count.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import (
    OF_METRICS,
    Counting,
    Weighted,
    check_class_weights,
    check_weighted,
    check_weights_fit,
)
from hvdtrain.backends.objective.logits import check_class_numbers, check_comparable, class_axis_of
from hvdtrain.backends.objective.objective import check_per_sample, shape_of

Tensor = Any


class Values(NamedTuple):
    """What an objective gave for the samples of one micro-batch."""

    losses: Tensor  # (samples,), fp32 or fp64, with gradient
    loss_weights: Tensor | None  # (samples,), without gradient; None if the loss has no weights of its own
    # (numbers, samples): for each name the values, times their weights; then the weights of each name that
    # has some. Their sums, weighted by sample, are reduced
    rows: Tensor


def as_arrays(value: Any) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the values that a loss or metric gave, and their weights if they have some."""
    values, weights = value if isinstance(value, Weighted) else (value, None)
    own = None if weights is None else tf.cast(weights, tf.float64).numpy()
    return tf.cast(values, tf.float64).numpy(), own


def check_values(given: Mapping[str, Any], samples: int | None) -> None:
    """Check the shapes of a loss, the first, and of metrics."""
    for index, (name, value) in enumerate(given.items()):
        what = name if index else "the loss"
        if isinstance(value, Weighted):
            values, weights = (tf.convert_to_tensor(part).shape for part in value)
            check_weighted(what, tuple(values), tuple(weights), samples)
        else:
            check_per_sample(what, shape_of(what, value), samples)


def weigh(given: Mapping[str, Any], samples: Tensor, kind: Any) -> Values:
    """Return values and weights of a loss, the first, and of metrics, for each sample."""
    pairs, weight_rows = [], []
    for value in given.values():
        weights: Tensor | None = None
        if isinstance(value, Weighted):
            values, weights = tf.cast(value.values, kind), tf.cast(value.weights, kind)
            weights = tf.stop_gradient(weights)
            if values.shape.rank == 0:
                weights = tf.fill([samples], weights / tf.cast(samples, kind))
                values = tf.fill([samples], values)
            weight_rows.append(weights)
        else:
            values = tf.cast(value, kind)
        pairs.append((values, weights))
    rows = [values if weights is None else values * weights for values, weights in pairs]
    return Values(*pairs[0], tf.stack(rows + weight_rows))


_KEY = "_keras_mask"


def mask_of(outputs: Any) -> Tensor | None:
    """Return the mask of a tensor; None if it has none."""
    return getattr(outputs, _KEY, None)


def with_mask(outputs: Tensor, mask: Tensor | None) -> Tensor:
    """Return a tensor that has this mask, if it is one."""
    if mask is not None:
        outputs._keras_mask = mask
    return outputs


def is_masked(outputs: Any) -> bool:
    """Return whether a tensor among a model's outputs has a mask."""
    return any(mask_of(tensor) is not None for tensor in tf.nest.flatten(outputs))


def shaped_like(mask: Tensor | None, targets: Tensor) -> Tensor | None:
    """Return a mask as floats of the targets' rank; None if there is none."""
    if mask is None:
        return None
    ones = [1] * (targets.shape.rank - mask.shape.rank)
    return tf.cast(tf.reshape(mask, tf.concat([tf.shape(mask), tf.constant(ones, tf.int32)], 0)), tf.float32)


def masks_beside(outputs: Any, batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a batch that carries the outputs' masks out of a compiled function, for ``masks_within``."""
    masks = {str(i): mask_of(t) for i, t in enumerate(tf.nest.flatten(outputs)) if mask_of(t) is not None}
    return {**batch, _KEY: masks} if masks else batch


def masks_within(outputs: Any, batch: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return outputs that have their masks again, and the batch without them."""
    tensors = tf.nest.flatten(outputs)
    for place, mask in batch.get(_KEY, {}).items():
        with_mask(tensors[int(place)], mask)
    return outputs, {name: array for name, array in batch.items() if name != _KEY}


Batch = Mapping[str, Tensor]
PerSample = Tensor  # or Weighted


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
    mask = mask_of(outputs)
    outputs, targets = classes_last("cross_entropy", outputs, batch["targets"], class_axis)
    soft = _is_soft(outputs, targets)
    counted = None if soft else _counted(targets, counting)
    targets = _classes(targets, counted)
    if soft:
        losses = tf.nn.softmax_cross_entropy_with_logits(targets, outputs)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(targets, outputs)
    if label_smoothing:
        of_all = tf.reduce_logsumexp(outputs, -1) - tf.reduce_mean(outputs, -1)
        losses = (1 - label_smoothing) * losses + label_smoothing * of_all
    weights = _product(counted, shaped_like(mask, losses))
    if counting.class_weights is not None:
        check_class_weights(counting.class_weights, outputs.shape[-1], soft)
        table = tf.constant(counting.class_weights, tf.float32)
        weights = _product(weights, tf.gather(table, targets))
    weights = _product(weights, _batch_weights("cross_entropy", losses, batch, counting))
    return _per_sample(losses, weights)


def binary_cross_entropy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> PerSample:
    """Cross-entropy of logits with targets in [0, 1]."""
    mask = mask_of(outputs)
    outputs, targets = _aligned("binary_cross_entropy", outputs, batch)
    losses = tf.nn.sigmoid_cross_entropy_with_logits(targets, outputs)
    weights = _batch_weights("binary_cross_entropy", targets, batch, counting)
    weights = _product(shaped_like(mask, targets), weights)
    return _per_sample(losses, _product(_counted(targets, counting), weights))


def mse(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> PerSample:
    """Mean squared error."""
    mask = mask_of(outputs)
    outputs, targets = _aligned("mse", outputs, batch)
    losses = tf.math.squared_difference(outputs, targets)
    weights = _batch_weights("mse", targets, batch, counting)
    return _per_sample(losses, _product(shaped_like(mask, targets), weights))


def mae(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> PerSample:
    """Mean absolute error."""
    mask = mask_of(outputs)
    outputs, targets = _aligned("mae", outputs, batch)
    weights = _batch_weights("mae", targets, batch, counting)
    return _per_sample(tf.abs(outputs - targets), _product(shaped_like(mask, targets), weights))


def accuracy(
    outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS, class_axis: int | None = None
) -> PerSample:
    """Return whether the largest logit is the target's."""
    mask = mask_of(outputs)
    outputs, targets = classes_last("accuracy", outputs, batch["targets"], class_axis)
    soft = _is_soft(outputs, targets)
    counted = None if soft else _counted(targets, counting)
    targets = tf.argmax(targets, -1) if soft else targets
    largest = tf.argmax(outputs, -1, output_type=targets.dtype)
    counted = _product(counted, shaped_like(mask, targets))
    return _per_sample(tf.cast(tf.equal(largest, targets), tf.float32), counted)


def top5_accuracy(
    outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS, class_axis: int | None = None
) -> PerSample:
    """Return whether the target's logit is among the five largest."""
    mask = mask_of(outputs)
    outputs, targets = classes_last("top5_accuracy", outputs, batch["targets"], class_axis)
    soft = _is_soft(outputs, targets)
    counted = None if soft else _counted(targets, counting)
    targets = tf.argmax(targets, -1) if soft else _classes(targets, counted)
    of_target = tf.gather(outputs, targets, batch_dims=targets.shape.rank)[..., None]
    larger = tf.reduce_sum(tf.cast(outputs > of_target, tf.int32), -1)
    return _per_sample(tf.cast(larger < 5, tf.float32), _product(counted, shaped_like(mask, targets)))


def binary_accuracy(outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> PerSample:
    """Return whether the logit's sign agrees with the target, 0 or 1."""
    mask = mask_of(outputs)
    outputs, targets = _aligned("binary_accuracy", outputs, batch)
    right = tf.cast(tf.equal(outputs > 0, targets > 0.5), tf.float32)
    return _per_sample(right, _product(_counted(targets, counting), shaped_like(mask, targets)))


NAMED = {
    function.__name__: function
    for function in (cross_entropy, binary_cross_entropy, mse, mae, accuracy, top5_accuracy, binary_accuracy)
}


def classes_last(
    name: str, outputs: Tensor, targets: Tensor, class_axis: int | None = None
) -> tuple[Tensor, Tensor]:
    """Return logits with the classes on the last axis, and targets (batch, ...) or, soft, of their shape."""
    rank = outputs.shape.rank
    if rank is None or (rank == 2 and targets.shape.rank == 1 and outputs.shape[1] != 1):
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


def _aligned(name: str, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    targets = batch["targets"]
    check_comparable(name, tuple(outputs.shape), tuple(targets.shape))
    return tf.reshape(outputs, tf.shape(targets)), tf.cast(targets, outputs.dtype)


def _counted(targets: Tensor, counting: Counting) -> Tensor | None:
    """Return 1 for each target that counts and 0 for others; None if all of them do."""
    if targets.shape.rank == 1 and not counting.of_samples:
        return None
    return tf.cast(tf.not_equal(targets, counting.ignore_index), tf.float32)


def _classes(targets: Tensor, counted: Tensor | None) -> Tensor:
    """Return the targets as class numbers, with 0 for those that do not count."""
    return targets if counted is None else targets * tf.cast(counted, targets.dtype)


def _batch_weights(name: str, targets: Tensor, batch: Batch, counting: Counting) -> Tensor | None:
    """Return the weights that a batch has, of the targets' rank; None if it has none."""
    if not (counting.batch_weights and "weights" in batch):
        return None
    weights = tf.cast(batch["weights"], tf.float32)
    check_weights_fit(name, tuple(weights.shape), tuple(targets.shape))
    missing = targets.shape.rank - weights.shape.rank
    return tf.reshape(weights, tf.concat([tf.shape(weights), tf.ones(missing, tf.int32)], 0))


def _product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the product of weights; None stands for weights that are all 1."""
    if one is None or other is None:
        return other if one is None else one
    return one * other


def _per_sample(values: Tensor, weights: Tensor | None) -> PerSample:
    """Return the mean within each sample: the weighted one with its weight if there are weights.

    The weight is a sum over axis 1, so that it does not depend on how far a batch is padded.
    """
    inner = list(range(1, values.shape.rank))
    if not inner:
        return values if weights is None else Weighted(values, weights)
    if weights is None:
        return tf.reduce_mean(values, inner)
    weights = tf.broadcast_to(weights, tf.shape(values))
    parts = (values * tf.cast(weights, values.dtype), weights)
    sums, shares = (
        tf.reduce_sum(tf.reduce_mean(part, inner[1:]) if inner[1:] else part, 1) for part in parts
    )
    return Weighted(sums / tf.cast(tf.where(shares > 0, shares, 1.0), sums.dtype), shares)
