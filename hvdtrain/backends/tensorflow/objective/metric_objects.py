"""Objects of Keras in an evaluation, and what else it needs; ``torch/`` has the same for torchmetrics."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective import metric_objects as shared
from hvdtrain.backends.objective.evaluation_metrics import MetricFunctions
from hvdtrain.backends.objective.stateful_metrics import Collectives
from hvdtrain.backends.tensorflow.objective.losses import LOSSES, to_numpy, with_mask

Tensor = Any

_MOST_COUNTED = 1 << 24  # float32 holds no odd number above it
# Keras's own classes that compare something else than arrays of one shape
_OF_OTHER_SHAPES = ("Sparse", "IoU", "MeanIoU", "OneHot")
# Keras's own classes that are wrong of logits, and do not say so
_OF_PROBABILITIES = {
    "AUC",
    "BinaryAccuracy",
    "BinaryCrossentropy",
    "BinaryIoU",
    "CategoricalCrossentropy",
    "Precision",
    "Recall",
    "SensitivitySpecificityBase",
    "SparseCategoricalCrossentropy",
    "_ConfusionMatrixConditionCount",
}


def as_array(value: Any) -> NDArray[Any]:
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
        names = [name for module in _metrics_within(metric) for name in _library_names(module)]
        settings = getattr(metric, "_fn_kwargs", {})
        thresholds = getattr(metric, "thresholds", None)
        takes_logits = getattr(metric, "_from_logits", False) or settings.get("from_logits", False)
        takes_logits = takes_logits or (thresholds is not None and list(np.atleast_1d(thresholds)) == [0.0])
        has_threshold = "FBetaScore" in names and metric.threshold is not None
        self.activation = self.of_logits if names and not takes_logits else ""
        self.needs_probabilities = not takes_logits and (
            has_threshold or not _OF_PROBABILITIES.isdisjoint(names)
        )
        self.moves_classes = bool(names) and self.of_logits == "softmax"
        self._has_other_shapes = not names or any(name.startswith(_OF_OTHER_SHAPES) for name in names)
        is_iou = "IoU" in names and "BinaryIoU" not in names
        self._takes_numbers = (is_iou and metric.sparse_y_pred) or names[:1] == ["Accuracy"]
        self.ignored = [getattr(metric, "ignore_class", settings.get("ignore_class"))]

    def probabilities(self, logits: NDArray[Any]) -> NDArray[Any]:
        """Return the activation of logits."""
        found = tf.sigmoid(logits) if self.activation == "sigmoid" else tf.nn.softmax(logits, -1)
        return to_numpy(found)

    def as_arguments(
        self, preds: NDArray[Any], targets: NDArray[Any], mask: NDArray[Any] | None
    ) -> tuple[Tensor, Tensor]:
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

    def computed(self, rows: dict[str, NDArray[Any]]) -> Any:
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


def _library_names(metric: Any) -> list[str]:
    """Return the names of an object's classes that are Keras's own, if its class or a base of it compares."""
    bases = ("Metric", "Mean", "KerasSaveable", "MeanMetricWrapper")
    kinds = [kind for kind in type(metric).__mro__ if kind.__module__.startswith("keras.")]
    return [kind.__name__ for kind in kinds if kind.__name__ not in bases]


COLLECTIVES = partial(
    Collectives,
    hvd=hvd,
    to_tensor=tf.constant,
    is_under_way=lambda: False,  # steps wait for what they begin
    on_host=partial(tf.device, "CPU"),
)
FUNCTIONS = MetricFunctions("tf", as_array, FedObject, LOSSES)
