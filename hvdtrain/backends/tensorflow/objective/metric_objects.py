"""Objects of Keras in an evaluation; ``torch/objective/metric_objects.py`` does the same for torchmetrics."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.evaluation_metrics import check_merges
from hvdtrain.backends.objective.logits import class_axis_of, logits_of
from hvdtrain.backends.objective.metric_objects import (
    TakenObject,
    in_call_order,
    is_same_but_units,
    taken_objects,
    targets_of,
)
from hvdtrain.backends.objective.stateful_metrics import Part, Rows, StatefulMetric
from hvdtrain.backends.tensorflow.objective.losses import mask_of, with_mask

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


class ObjectInputs:
    """Makes the arguments of an object's update of a model's outputs and a batch.

    Args:
        taken: the object, and what it is given.
        metric: the object that is updated.
    """

    def __init__(self, taken: TakenObject, metric: Any) -> None:
        self._taken, self._metric = taken, metric
        names = [name for module in metrics_within(metric) for name in _library_names(module)]
        self._takes_classes = bool(names)
        self._has_other_shapes = not names or any(name.startswith(_OF_OTHER_SHAPES) for name in names)
        self._takes_numbers = "IoU" in names and "BinaryIoU" not in names and metric.sparse_y_pred
        self._is_plain_accuracy = names[:1] == ["Accuracy"]
        self._guessed = "" if not names or _takes_logits(metric) else taken.activation
        has_threshold = "FBetaScore" in names and metric.threshold is not None
        self._needs_probabilities = not _takes_logits(metric) and (
            has_threshold or not _OF_PROBABILITIES.isdisjoint(names)
        )
        settings = getattr(metric, "_fn_kwargs", {})
        ignored = getattr(metric, "ignore_class", settings.get("ignore_class"))
        self._must_not_have = None if taken.ignore_index == ignored else taken.ignore_index

    def __call__(
        self, outputs: Any, batch: Mapping[str, Any], is_counted: NDArray[np.bool_]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, by position and by name, of the samples that count.

        Raises:
            TaskError: If they would give wrong numbers.
        """
        given = self._taken.given
        if given.preds is None and not tf.is_tensor(outputs):
            outputs = logits_of(f"metrics[{self._taken.name!r}]", outputs)
        mask = mask_of(outputs)
        if not is_counted.all():
            mask = _rows_of(mask, is_counted)
            outputs, batch = _rows_of(outputs, is_counted), _rows_of(dict(batch), is_counted)
        preds = outputs if given.preds is None else given.preds(outputs, batch)
        targets = targets_of(self._taken, outputs, batch)
        if not tf.is_tensor(preds) or not tf.is_tensor(targets):
            return in_call_order(self._metric.update_state, preds, targets, targets_first=True)
        if self._takes_classes:
            preds, targets = self._of_classes(preds, targets)
        if preds.shape != targets.shape and is_same_but_units(tuple(preds.shape), tuple(targets.shape)):
            preds = tf.reshape(preds, targets.shape)
        if preds.shape.rank == 1 and targets.shape.rank == 1:
            # as in fit(): Keras's functions take the mean over the last axis
            preds, targets = preds[:, None], targets[:, None]
        if self._must_not_have is not None and bool(
            tf.reduce_any(tf.equal(targets, tf.cast(self._must_not_have, targets.dtype)))
        ):
            raise self._taken.error(
                f"is given targets of {self._must_not_have}, which the loss leaves out",
                f"Construct it with ignore_class={self._must_not_have}, if it has that, or leave them out: "
                "hvdtrain.MetricObject(tf=..., preds=..., targets=...) may select rows.",
            )
        self._check_comparable(preds, targets)
        if mask is not None and (given.preds is None or preds.shape[:2] == outputs.shape[:2]):
            preds = with_mask(tf.identity(preds), mask)  # which Keras's means leave out
        return in_call_order(self._metric.update_state, preds, targets, targets_first=True)

    def _of_classes(self, preds: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what Keras's own metrics take: classes on the last axis, and probabilities."""
        taken = self._taken
        if not preds.dtype.is_floating or taken.given.preds is not None:
            return preds, targets
        if taken.activation == "softmax" and preds.shape.rank == targets.shape.rank + 1:
            axis = class_axis_of(
                f"metrics[{taken.name!r}]", tuple(preds.shape), tuple(targets.shape), taken.class_axis
            )
            preds = tf.experimental.numpy.moveaxis(preds, axis, -1)
        if self._guessed:
            preds = tf.sigmoid(preds) if self._guessed == "sigmoid" else tf.nn.softmax(preds, -1)
        return preds, targets

    def _check_comparable(self, preds: Tensor, targets: Tensor) -> None:
        """Check that Keras would not compare, or broadcast, what does not belong together."""
        taken, shapes = self._taken, f"predictions {tuple(preds.shape)} and targets {tuple(targets.shape)}"
        if self._needs_probabilities and not bool(tf.reduce_all((preds >= 0) & (preds <= 1))):
            raise taken.error(
                "takes probabilities, and is given numbers outside of [0, 1]",
                "Construct it with from_logits=True, if it has that, or give hvdtrain.MetricObject(tf=..., "
                "preds=lambda outputs, batch: tf.sigmoid(outputs)).",
            )
        if self._takes_numbers and preds.dtype.is_floating and bool(tf.reduce_any(preds != tf.round(preds))):
            raise taken.error(
                f"takes class numbers as predictions and would round probabilities down; found {shapes}",
                "Construct it with sparse_y_pred=False, or give hvdtrain.MetricObject(tf=..., preds=lambda "
                "outputs, batch: outputs.numpy().argmax(-1)).",
            )
        if self._is_plain_accuracy and taken.given.preds is None:
            raise taken.error(
                "counts predictions that equal their targets exactly, and the model's outputs are no classes",
                "Give SparseCategoricalAccuracy, CategoricalAccuracy or BinaryAccuracy.",
            )
        if not self._has_other_shapes and preds.shape != targets.shape:
            raise taken.error(
                f"compares arrays of one shape; found {shapes}",
                "For class numbers as targets give the Sparse... metric, or one-hot targets: "
                "hvdtrain.MetricObject(tf=..., targets=...).",
            )


def metrics_within(metric: Any) -> Iterator[Any]:
    """Yield an object of Keras and those that it consists of."""
    yield metric
    for part in metric._metrics:
        yield from metrics_within(part)


def _library_names(metric: Any) -> list[str]:
    """Return the names of an object's classes that are Keras's own, if its class or a base of it compares."""
    bases = ("Metric", "Mean", "KerasSaveable", "MeanMetricWrapper")
    kinds = [kind for kind in type(metric).__mro__ if kind.__module__.startswith("keras.")]
    return [kind.__name__ for kind in kinds if kind.__name__ not in bases]


def _takes_logits(metric: Any) -> bool:
    """Return whether an object of Keras is constructed for logits."""
    settings = getattr(metric, "_fn_kwargs", {})
    if getattr(metric, "_from_logits", False) or settings.get("from_logits", False):
        return True
    thresholds = getattr(metric, "thresholds", None)
    return thresholds is not None and list(np.atleast_1d(thresholds)) == [0.0]


def _rows_of(tree: Any, is_counted: NDArray[np.bool_]) -> Any:
    """Return outputs or a batch without the samples that do not count."""
    places = tf.constant(np.flatnonzero(is_counted))

    def rows(tensor: Any) -> Any:
        if not tf.is_tensor(tensor) or tensor.shape[:1] != (len(is_counted),):
            return tensor
        return tf.gather(tensor, places)

    return tf.nest.map_structure(rows, tree)


def object_states(name: str, value: Any, task: Any) -> dict[str, StatefulMetric]:
    """Return the states of a task's metric that is an object.

    Args:
        name: the metric's.
        value: what ``is_metric_object`` says yes to.
        task: the task.

    Raises:
        TaskError: If the object cannot be used.
    """
    return {taken.name: ObjectState(taken) for taken in taken_objects(name, value, task, "tf")}


class ObjectState:
    """An object of Keras in an evaluation.

    After each update what has been added to its variables is moved to arrays of this class, in float64: the
    object's own variables have 24 bits, and stop counting at 16 million.

    Args:
        taken: the object. It is used as it is, and reset.
    """

    def __init__(self, taken: TakenObject) -> None:
        self._taken, self._metric = taken, taken.metric
        self._inputs = ObjectInputs(taken, self._metric)
        # the variables after a reset; some objects make them in the first update
        self._initial: list[NDArray[Any]] | None = None
        self.begin()

    def begin(self) -> None:
        """Forget all batches."""
        self._metric.reset_state()
        self._sums: list[NDArray[np.float64]] | None = None

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Add a micro-batch."""
        if self._initial is None:
            self._check(outputs, batch, rows)
        self._update(outputs, batch, rows)

    def parts(self) -> Mapping[str, Part]:
        """Return the state of this worker."""
        assert self._initial is not None  # an evaluation has at least one batch
        sums = self._sums or [np.zeros(array.shape) for array in self._initial]
        names = [f"{place} {variable.name}" for place, variable in enumerate(self._metric.variables)]
        return {name: Part(array, "sum") for name, array in zip(names, sums, strict=True)}

    def compute(self, merged: dict[str, NDArray[Any]]) -> Any:
        """Return the metric's value."""
        assert self._initial is not None  # as above
        for variable, initial, added in zip(
            self._metric.variables, self._initial, merged.values(), strict=True
        ):
            value = initial.astype(np.float64) + added
            if initial.dtype.kind in "iu":
                value = np.rint(value)
                if value.max(initial=0) > np.iinfo(initial.dtype).max:
                    raise self._taken.error(
                        f"counts to {value.max():.0f}, which its {initial.dtype} cannot hold",
                        "Construct it with dtype='float32'.",
                    )
            variable.assign(value.astype(initial.dtype))
        value = self._metric.result()
        number = self._taken.given.result(value) if self._taken.given.result else value
        return self._taken.number(number.numpy() if tf.is_tensor(number) else number)

    def _check(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Learn the variables from the first batch, and check that they can be added up."""

        def state_of(some: Rows) -> Mapping[str, Part]:
            self.begin()
            self._update(outputs, batch, some)
            return self.parts()

        sample = rows if rows.is_counted.any() else rows._replace(is_counted=np.ones_like(rows.is_counted))
        self._call(outputs, batch, sample)
        if not self._metric.variables:
            raise self._taken.error(
                "has no variable, so the workers' states cannot be added up",
                "Call self.add_variable() in its __init__ for whatever update_state() changes.",
            )
        self._metric.reset_state()
        self._initial = self._values()
        try:
            check_merges(self._taken, rows, state_of, self.compute)
        finally:
            self.begin()

    def _update(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Update the object with the rows that count, and take what they add out of it."""
        if not rows.is_counted.any():
            return
        self._metric.reset_state()
        self._call(outputs, batch, rows)
        assert self._initial is not None  # set before the first update
        added = [
            now.astype(np.float64) - before for now, before in zip(self._values(), self._initial, strict=True)
        ]
        self._sums = added if self._sums is None else [a + b for a, b in zip(self._sums, added, strict=True)]

    def _call(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        arguments, named = self._inputs(outputs, batch, rows.is_counted)
        self._metric.update_state(*arguments, **named)

    def _values(self) -> list[NDArray[Any]]:
        return [np.array(variable.numpy()) for variable in self._metric.variables]
