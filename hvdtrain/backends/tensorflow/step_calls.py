"""What workers compare of their calls in an own step, in TensorFlow."""

from collections.abc import Sequence
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from hvdtrain.backends.step_calls import CallsBase
from hvdtrain.backends.tensorflow.traced_workers import TracedWorkers
from hvdtrain.errors import TaskError

Tensor = Any

# how the message of a step begins whose workers' calls differ
_DIFFERENT_CALLS = "hvdtrain.own_step:"


class Calls(CallsBase[list[Any]]):
    """The calls of a step; what they return are the operations of a check, which fail if calls differ.

    Args:
        names: the optimizers.
        workers: the job's workers.
    """

    def __init__(self, names: Sequence[str], workers: TracedWorkers) -> None:
        super().__init__(names)
        self._workers = workers
        self._errors: list[TaskError] = []  # of all steps traced so far, by what their messages give
        self._zero = tf.Variable(0.0, trainable=False, name="zero", dtype=tf.float64)

    def error_of(self, error: Exception) -> TaskError | None:
        """Return the error for workers whose calls differ, if that is what an exception of a step says."""
        _, found, rest = str(error).partition(_DIFFERENT_CALLS)
        return self._errors[int(rest.split(":")[0])] if found else None

    def _compare(self, name: str, number: int, codes: list[float], different_form: TaskError) -> list[Any]:
        if not self._workers.may_reduce:
            return []
        # with a variable, as TensorFlow would work out the sum of constants when it compiles the step
        own = tf.constant(codes, tf.float64) + self._zero.read_value()
        summed = hvd.allreduce(own, op=hvd.Sum, name=f"hvdtrain.own_step.{number}")
        is_equal = tf.equal(summed, own * tf.cast(self._workers.size, tf.float64))
        different_call = self._different_call(name, number)
        with tf.control_dependencies([self._assert(is_equal[:2], different_call)]):
            return [self._assert(is_equal, different_form)]

    def _assert(self, is_equal: Tensor, error: TaskError) -> Any:
        self._errors.append(error)
        message = f"{_DIFFERENT_CALLS}{len(self._errors) - 1}:"
        return tf.debugging.Assert(tf.reduce_all(is_equal), [message])
