"""What workers compare of their calls in an own step, in TensorFlow."""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.own_step import (
    different_calls,
    different_metrics,
    different_weighting,
    metrics_code,
)
from hvdtrain.errors import TaskError

Tensor = Any

# how the message of a step begins whose workers' calls differ
_DIFFERENT_CALLS = "hvdtrain.own_step:"


class Calls:
    """Checks that all workers make the same calls in a step, with an all-reduce of four numbers for each.

    If they did not, each would wait for sums that others do not compute.

    Args:
        names: the optimizers.
        size: number of workers.
    """

    def __init__(self, names: Sequence[str], size: int) -> None:
        self._codes = {"": 0.0} | {name: 1.0 + place for place, name in enumerate(names)}
        self._size = size
        self._number = 0
        self._errors: list[TaskError] = []  # of all steps traced so far, by what their messages give
        self._zero = tf.Variable(0.0, trainable=False, name="zero", dtype=tf.float64)

    def begin(self) -> None:
        """Begin a step. Local: no collective."""
        self._number = 0

    def announce(self, name: str, is_weighted: bool) -> list[Any]:
        """Collective. Return the operations that check a call; they fail on all workers if calls differ.

        Args:
            name: the optimizer whose gradients are about to be reduced.
            is_weighted: whether its losses have weights of their own, which are then summed as well.
        """
        return self._announce(name, float(is_weighted), different_weighting(name, self._number))

    def announce_end(self, names: Sequence[str], weighted: Sequence[str]) -> list[Any]:
        """Collective. Return the operations that check the end of a step.

        They fail on all workers if another made a call or returned other metrics.

        Args:
            names: "loss" and the metrics that the step returned, which are summed by position.
            weighted: those of them that are Weighted.
        """
        return self._announce("", metrics_code(names, weighted), different_metrics(names, weighted))

    def error_of(self, error: Exception) -> TaskError | None:
        """Return the error for workers whose calls differ, if that is what an exception of a step says."""
        _, found, rest = str(error).partition(_DIFFERENT_CALLS)
        return self._errors[int(rest.split(":")[0])] if found else None

    def _announce(self, name: str, form: float, different_form: TaskError) -> list[Any]:
        number, code = self._number, self._codes[name]
        self._number += 1
        if self._size == 1:
            return []
        # with a variable, as TensorFlow would work out the sum of constants when it compiles the step
        own = tf.constant([code, code * code, form, form * form], tf.float64) + self._zero.read_value()
        summed = hvd.allreduce(own, op=hvd.Sum, name=f"hvdtrain.own_step.{number}")
        # the mean and the mean square are this worker's only if all codes are equal
        is_equal = tf.equal(summed, own * self._size)
        different_call = different_calls(f"gradients() of {name!r}" if name else "the end", number)
        with tf.control_dependencies([self._assert(is_equal[:2], different_call)]):
            return [self._assert(is_equal, different_form)]

    def _assert(self, is_equal: Tensor, error: TaskError) -> Any:
        self._errors.append(error)
        message = f"{_DIFFERENT_CALLS}{len(self._errors) - 1}:"
        return tf.debugging.Assert(tf.reduce_all(is_equal), [message])
