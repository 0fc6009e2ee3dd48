"""Named losses and metrics in TensorFlow, and objects of Keras; ``torch/`` has the same for PyTorch."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective import metric_objects as shared
from hvdtrain.backends.objective.evaluation_metrics import MetricFunctions
from hvdtrain.backends.objective.losses import NamedLosses, PerSample, Values, Weighted, mask_of

Tensor = Any
Array = NDArray[Any]


def to_numpy(tensor: Any) -> Array:
    """Return a tensor as an array."""
    return np.asarray(keras.ops.convert_to_numpy(tensor))


def as_arrays(value: Any) -> tuple[Array, Array | None]:
    """Return the values that a loss or metric gave, and their weights if they have some."""
    values, weights = value if isinstance(value, Weighted) else (value, None)
    own = None if weights is None else tf.cast(weights, tf.float64).numpy()
    return tf.cast(values, tf.float64).numpy(), own


def weigh(given: Mapping[str, Any], samples: Tensor, kind: Any) -> Values[Tensor]:
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


def with_mask(outputs: Tensor, mask: Tensor | None) -> Tensor:
    """Return a tensor that has this mask, if it is one."""
    if mask is not None:
        outputs._keras_mask = mask
    return outputs


def is_masked(outputs: Any) -> bool:
    """Return whether a tensor among a model's outputs has a mask."""
    return any(mask_of(tensor) is not None for tensor in tf.nest.flatten(outputs))


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


def _moved_last(tensor: Tensor, axis: int) -> Tensor:
    rest = [i for i in range(tensor.shape.rank) if i != axis]
    return tensor if axis == len(rest) else tf.transpose(tensor, [*rest, axis])


def _aligned(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return tf.reshape(outputs, tf.shape(targets)), tf.cast(targets, outputs.dtype)


def _entropies(outputs: Tensor, targets: Tensor, counted: Tensor, ignored: int, smoothing: float) -> Tensor:
    if targets.shape.rank == outputs.shape.rank:
        losses = tf.nn.softmax_cross_entropy_with_logits(targets, outputs)
    else:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(counted, outputs)
    if smoothing:
        of_all = tf.reduce_logsumexp(outputs, -1) - tf.reduce_mean(outputs, -1)
        losses = (1 - smoothing) * losses + smoothing * of_all
    return losses


def _compared(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if name == "binary_cross_entropy":
        return tf.nn.sigmoid_cross_entropy_with_logits(targets, outputs)
    if name == "binary_accuracy":
        return tf.cast(tf.equal(outputs > 0, targets > 0.5), tf.float32)
    return tf.math.squared_difference(outputs, targets) if name == "mse" else tf.abs(outputs - targets)


def _is_in_top5(outputs: Tensor, classes: Tensor) -> Tensor:
    of_target = tf.gather(outputs, classes, batch_dims=classes.shape.rank)[..., None]
    return tf.reduce_sum(tf.cast(outputs > of_target, tf.int32), -1) < 5


def _means(values: Tensor, weights: Tensor | None) -> PerSample:
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


LOSSES = NamedLosses(
    rank=lambda tensor: tensor.shape.rank,
    floats=partial(tf.cast, dtype=tf.float32),
    is_floating=lambda tensor: bool(tensor.dtype.is_floating),
    largest=partial(tf.argmax, axis=-1),
    moved_last=_moved_last,
    aligned=_aligned,
    with_zeros=lambda targets, counted: targets * tf.cast(counted, targets.dtype),
    looked_up=lambda weights, classes: tf.gather(tf.constant(weights, tf.float32), classes),
    entropies=_entropies,
    compared=_compared,
    is_largest=lambda outputs, of: tf.equal(tf.argmax(outputs, -1, output_type=of.dtype), of),
    is_in_top5=_is_in_top5,
    means=_means,
)
NAMED = LOSSES.table


_MOST_COUNTED = 1 << 24  # float32 holds no odd number above it
# Keras's own classes that compare nothing themselves
_BASES = ("Metric", "Mean", "KerasSaveable", "MeanMetricWrapper")
# those that compare something else than arrays of one shape
_OF_OTHER_SHAPES = ("Sparse", "IoU", "MeanIoU", "OneHot")
# those that are wrong of logits, and do not say so
_OF_PROBABILITIES = {
    "AUC", "BinaryAccuracy", "BinaryCrossentropy", "BinaryIoU", "CategoricalCrossentropy", "Precision",
    "Recall", "SensitivitySpecificityBase", "SparseCategoricalCrossentropy", "_ConfusionMatrixConditionCount",
}  # fmt: skip


def as_array(value: Any) -> Array:
    """Return what an update gave as an array: a tensor on any device, or what numpy takes."""
    array = to_numpy(value) if tf.is_tensor(value) or keras.ops.is_tensor(value) else np.asarray(value)
    return array.astype(np.float32) if array.dtype.name == "bfloat16" else array


class FedObject(shared.FedObject):
    """An object of Keras, which is used itself."""

    framework, class_place, targets_first = "tf", -1, True

    def __init__(self, name: str, value: Any, task: Any) -> None:
        super().__init__(name, value, task)
        metric = self.metric
        self.reset, self.update, self.result = metric.reset_state, metric.update_state, metric.result
        names = [
            kind.__name__
            for module in _metrics_within(metric)
            for kind in type(module).__mro__
            if kind.__module__.startswith("keras.") and kind.__name__ not in _BASES
        ]
        settings = getattr(metric, "_fn_kwargs", {})
        thresholds = getattr(metric, "thresholds", None)
        takes_logits = getattr(metric, "_from_logits", False) or settings.get("from_logits", False)
        takes_logits = takes_logits or (thresholds is not None and list(np.atleast_1d(thresholds)) == [0.0])
        has_threshold = "FBetaScore" in names and metric.threshold is not None
        self.activation = self.of_logits if names and not takes_logits else ""
        is_of_probabilities = has_threshold or not _OF_PROBABILITIES.isdisjoint(names)
        self.needs_probabilities = not takes_logits and is_of_probabilities
        self.moves_classes = bool(names) and self.of_logits == "softmax"
        self._has_other_shapes = not names or any(name.startswith(_OF_OTHER_SHAPES) for name in names)
        is_iou = "IoU" in names and "BinaryIoU" not in names
        self._takes_numbers = (is_iou and metric.sparse_y_pred) or names[:1] == ["Accuracy"]
        self.ignored = [getattr(metric, "ignore_class", settings.get("ignore_class"))]

    def probabilities(self, logits: Array) -> Array:
        """Return the activation of logits."""
        found = tf.sigmoid(logits) if self.activation == "sigmoid" else tf.nn.softmax(logits, -1)
        return to_numpy(found)

    def as_arguments(self, preds: Array, targets: Array, mask: Array | None) -> tuple[Tensor, Tensor]:
        """Return predictions and targets as tensors that Keras does not broadcast, and their mask, if any."""
        if preds.ndim == 1 and targets.ndim == 1:
            # as in fit(): Keras's functions take the mean over the last axis
            preds, targets = preds[:, None], targets[:, None]
        shapes = f"predictions {preds.shape} and targets {targets.shape}"
        if self._takes_numbers and preds.dtype.kind == "f" and (preds != preds.round()).any():
            raise self.error(
                f"takes class numbers as predictions; found {shapes} with others",
                "Construct it with sparse_y_pred=False if it has that, give SparseCategoricalAccuracy or "
                "BinaryAccuracy, or hvdtrain.MetricObject(tf=..., preds=lambda outputs, batch: "
                "outputs.numpy().argmax(-1)).",
            )
        if not self._has_other_shapes and preds.shape != targets.shape:
            raise self.error(
                f"compares arrays of one shape; found {shapes}",
                "For class numbers as targets give the Sparse... metric, or one-hot targets: "
                "hvdtrain.MetricObject(tf=..., targets=...).",
            )
        given = tf.constant(preds)
        if mask is not None:
            given = with_mask(tf.identity(given), tf.constant(mask))  # which Keras's means leave out
        return given, tf.constant(targets)

    def computed(self, rows: dict[str, Array]) -> Any:
        """Return the object's value of all rows."""
        value = super().computed(rows)
        if rows["targets"].size > _MOST_COUNTED and any(v.dtype == "float32" for v in self.metric.variables):
            raise self.error(
                f"is given more than {_MOST_COUNTED:,} targets, which Keras cannot count in float32",
                "Construct it with dtype='float64', or write hvdtrain.SumMetric.",
            )
        return value


def _metrics_within(metric: Any) -> Iterator[Any]:
    """Yield an object of Keras and those that it consists of."""
    yield metric
    for part in metric._metrics:
        yield from _metrics_within(part)


FUNCTIONS = MetricFunctions("tf", as_array, FedObject, LOSSES)
