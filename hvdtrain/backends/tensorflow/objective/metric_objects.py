"""Objects of Keras in an evaluation, and what else it needs; ``torch/`` has the same for torchmetrics."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective import metric_objects as shared
from hvdtrain.backends.objective.logits import class_axis_of
from hvdtrain.backends.objective.metric_objects import TakenObject, in_call_order, is_same_but_units
from hvdtrain.backends.objective.named_metrics import MetricFunctions
from hvdtrain.backends.objective.stateful_metrics import Collectives, Rows, StatefulMetric
from hvdtrain.backends.tensorflow.objective.losses import classes_last, cross_entropy, mask_of, with_mask
from hvdtrain.backends.tensorflow.program import to_numpy

Tensor = Any

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
    return to_numpy(value) if tf.is_tensor(value) or keras.ops.is_tensor(value) else np.asarray(value)


def object_states(name: str, value: Any, task: Any) -> dict[str, StatefulMetric]:
    """Return the states of a task's metric that is an object."""
    return {taken.name: ObjectState(taken) for taken in shared.taken_objects(name, value, task, "tf")}


class ObjectState(shared.ObjectState):
    """An object of Keras in an evaluation: what updates add to its variables is added up.

    After each update that is done in float64: the object's own variables have 24 bits, and stop counting at
    16 million. The object itself is used, and reset.
    """

    def __init__(self, taken: TakenObject) -> None:
        self._metric = metric = taken.metric
        # the variables after a reset; some objects make them in the first update
        self._initial: list[NDArray[Any]] = []
        self._has_updated = False
        names = [name for module in _metrics_within(metric) for name in _library_names(module)]
        settings = getattr(metric, "_fn_kwargs", {})
        self._takes_classes = bool(names)
        self._has_other_shapes = not names or any(name.startswith(_OF_OTHER_SHAPES) for name in names)
        is_iou = "IoU" in names and "BinaryIoU" not in names
        self._takes_numbers = (is_iou and metric.sparse_y_pred) or names[:1] == ["Accuracy"]
        has_threshold = "FBetaScore" in names and metric.threshold is not None
        thresholds = getattr(metric, "thresholds", None)
        takes_logits = getattr(metric, "_from_logits", False) or settings.get("from_logits", False)
        takes_logits = takes_logits or (thresholds is not None and list(np.atleast_1d(thresholds)) == [0.0])
        self._activation = "" if not names or takes_logits else taken.activation
        self._needs_probabilities = not takes_logits and (
            has_threshold or not _OF_PROBABILITIES.isdisjoint(names)
        )
        ignores = [getattr(metric, "ignore_class", settings.get("ignore_class"))]
        super().__init__(taken, as_array, ignores)

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Add a micro-batch; one of padding alone makes the variables that rank 0 needs for other workers."""
        if not self._has_updated and not rows.is_counted.any():
            type(self)(self.taken)._add(outputs, batch, np.ones_like(rows.is_counted))
        super().add(outputs, batch, rows)

    def _reset(self) -> None:
        self._metric.reset_state()
        self._sums: list[Any] = []

    def _rows_of(self, tree: Any, is_counted: NDArray[np.bool_]) -> Any:
        places = tf.constant(np.flatnonzero(is_counted))

        def rows(tensor: Any) -> Any:
            if not tf.is_tensor(tensor) or tensor.shape[:1] != (len(is_counted),):
                return tensor
            mask = mask_of(tensor)
            return with_mask(tf.gather(tensor, places), None if mask is None else tf.gather(mask, places))

        return tf.nest.map_structure(rows, tree)

    def _update(self, preds: Any, targets: Any, outputs: Any) -> None:
        if tf.is_tensor(preds) and tf.is_tensor(targets):
            mask, is_output = mask_of(outputs), self.taken.given.preds is None
            if self._takes_classes and is_output and preds.dtype.is_floating:
                preds = self._of_classes(preds, targets)
            if is_same_but_units(preds, targets):
                preds = tf.reshape(preds, targets.shape)
            if preds.shape.rank == 1 and targets.shape.rank == 1:
                # as in fit(): Keras's functions take the mean over the last axis
                preds, targets = preds[:, None], targets[:, None]
            self._check_comparable(preds, targets)
            if mask is not None and (is_output or preds.shape[:2] == outputs.shape[:2]):
                preds = with_mask(tf.identity(preds), mask)  # which Keras's means leave out
        if not self._has_updated:
            in_call_order(self._metric.update_state, preds, targets, targets_first=True)
            if not self._metric.variables:
                raise self.taken.error(
                    "has no variable, so the workers' states cannot be added up",
                    "Call self.add_variable() in its __init__ for whatever update_state() changes.",
                )
            self._has_updated = True
        self._metric.reset_state()
        self._initial = self._values()
        in_call_order(self._metric.update_state, preds, targets, targets_first=True)
        sums = self._sums or [0.0] * len(self._initial)
        self._sums = [
            total + (now.astype(np.float64) - before)
            for total, now, before in zip(sums, self._values(), self._initial, strict=True)
        ]

    def _of_classes(self, preds: Tensor, targets: Tensor) -> Tensor:
        """Return what Keras's own metrics take: classes on the last axis, and probabilities."""
        taken = self.taken
        if taken.activation == "softmax" and preds.shape.rank == targets.shape.rank + 1:
            shapes = tuple(preds.shape), tuple(targets.shape)
            axis = class_axis_of(f"metrics[{taken.name!r}]", *shapes, taken.class_axis)
            preds = tf.experimental.numpy.moveaxis(preds, axis, -1)
        if self._activation:
            preds = tf.sigmoid(preds) if self._activation == "sigmoid" else tf.nn.softmax(preds, -1)
        return preds

    def _check_comparable(self, preds: Tensor, targets: Tensor) -> None:
        """Check that Keras would not compare, or broadcast, what does not belong together."""
        taken, shapes = self.taken, f"predictions {tuple(preds.shape)} and targets {tuple(targets.shape)}"
        if self._needs_probabilities and not bool(tf.reduce_all((preds >= 0) & (preds <= 1))):
            raise taken.error(
                "takes probabilities, and is given numbers outside of [0, 1]",
                "Construct it with from_logits=True, if it has that, or give hvdtrain.MetricObject(tf=..., "
                "preds=lambda outputs, batch: tf.sigmoid(outputs)).",
            )
        if self._takes_numbers and preds.dtype.is_floating and bool(tf.reduce_any(preds != tf.round(preds))):
            raise taken.error(
                f"takes class numbers as predictions; found {shapes} with others",
                "Construct it with sparse_y_pred=False if it has that, give SparseCategoricalAccuracy or "
                "BinaryAccuracy, or hvdtrain.MetricObject(tf=..., preds=lambda outputs, batch: "
                "outputs.numpy().argmax(-1)).",
            )
        if not self._has_other_shapes and preds.shape != targets.shape:
            raise taken.error(
                f"compares arrays of one shape; found {shapes}",
                "For class numbers as targets give the Sparse... metric, or one-hot targets: "
                "hvdtrain.MetricObject(tf=..., targets=...).",
            )

    def _state(self) -> dict[str, Any]:
        return {str(place): array for place, array in enumerate(self._sums)}

    def _comparable(self, states: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        variables = enumerate(self._metric.variables)
        return {
            f"{place} {variable.name}": np.asarray(sum(state[str(place)] for state in states))
            for place, variable in variables
        }

    def _merged(self, states: list[dict[str, Any]], samples: list[int]) -> Any:
        if not self._initial:  # no sample of this worker counted
            self._metric.reset_state()
            self._initial = self._values()
        for place, (variable, initial) in enumerate(zip(self._metric.variables, self._initial, strict=True)):
            value = initial.astype(np.float64) + sum(state[str(place)] for state in states)
            if initial.dtype.kind in "iu" and np.max(value, initial=0) > np.iinfo(initial.dtype).max:
                raise self.taken.error(
                    f"counts to {np.max(value):.0f}, which its {initial.dtype} cannot hold",
                    "Construct it with dtype='float32'.",
                )
            variable.assign((np.rint(value) if initial.dtype.kind in "iu" else value).astype(initial.dtype))
        return self._metric.result()

    def _values(self) -> list[NDArray[Any]]:
        return [np.array(variable.numpy()) for variable in self._metric.variables]


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


class HorovodCollectives(Collectives):
    """How objects, as bytes, and the states of metrics move between workers."""

    hvd = hvd
    to_tensor = staticmethod(tf.constant)
    on_host = staticmethod(partial(tf.device, "CPU"))

    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for: steps wait for theirs."""
        return False


FUNCTIONS = MetricFunctions(
    "tf",
    as_array,
    object_states,
    cross_entropy,
    classes_last,
    argmax=partial(tf.argmax, axis=-1),
    mask_of=mask_of,
)
