"""Objects of Keras in an evaluation; ``torch/metric_objects.py`` does the same for torchmetrics."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.object_merging import check_merges
from hvdtrain.backends.objective.metric_objects import TakenObject, taken_objects
from hvdtrain.backends.objective.stateful_metrics import Part, Rows, StatefulMetric
from hvdtrain.backends.tensorflow.object_inputs import ObjectInputs


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
