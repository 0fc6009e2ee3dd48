"""Values with weights of their own in TensorFlow; ``torch/weighting.py`` does the same for PyTorch."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import Weighted, check_weighted
from hvdtrain.backends.objective.objective import check_per_sample, shape_of

Tensor = Any


class Values(NamedTuple):
    """What an objective gave for the samples of one micro-batch.

    Attributes:
        losses: (samples,), fp32 or fp64, with gradient.
        loss_weights: (samples,), without gradient; None if the loss has no weights of its own.
        rows: (numbers, samples): for each name the values, times their weights; then the weights of each
            name that has some. Their sums, weighted by sample, are reduced.
    """

    losses: Tensor
    loss_weights: Tensor | None
    rows: Tensor


def as_arrays(value: Any) -> tuple[NDArray[Any], NDArray[Any] | None]:
    """Return the values that a loss or metric gave, and their weights if they have some."""
    values, weights = value if isinstance(value, Weighted) else (value, None)
    own = None if weights is None else tf.cast(weights, tf.float64).numpy()
    return tf.cast(values, tf.float64).numpy(), own


def check_values(given: Mapping[str, Any], samples: int | None) -> None:
    """Check the shapes of a loss, the first, and of metrics.

    Raises:
        TaskError: naming the one that has another.
    """
    for index, (name, value) in enumerate(given.items()):
        what = name if index else "the loss"
        if isinstance(value, Weighted):
            values, weights = (tf.convert_to_tensor(part).shape for part in value)
            check_weighted(what, tuple(values), tuple(weights), samples)
        else:
            check_per_sample(what, shape_of(what, value), samples)


def weigh(given: Mapping[str, Any], samples: Tensor, kind: Any) -> Values:
    """Return values and weights of a loss, the first, and of metrics, for each sample.

    A batch's mean becomes the value of each of its samples, with an equal part of the weight.

    Args:
        given: the loss and the metrics.
        samples: number of samples.
        kind: the type of the result.
    """
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
