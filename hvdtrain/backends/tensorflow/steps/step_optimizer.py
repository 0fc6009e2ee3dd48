"""The optimizers that a task's own step is given in TensorFlow; as in ``torch/steps/step_optimizer.py``."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from hvdtrain.backends.custom_step import (
    CallsBase,
    StepOptimizerBase,
    StepPart,
    check_gradients,
    check_reached,
    stepped_alone,
)
from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.backends.reduction import choose_reducer
from hvdtrain.backends.tensorflow.functions import clip_by_norm, dense, native, normalized
from hvdtrain.backends.tensorflow.objective.losses import check_values
from hvdtrain.backends.tensorflow.precision import own_scale, scaled, unscaled
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.backends.tensorflow.traced_workers import TracedWorkers
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

Tensor = Any

# how the message of a step begins whose workers' calls differ
_DIFFERENT_CALLS = "hvdtrain.own_step:"


class Calls(CallsBase[list[Any]]):
    """The calls of a step; what they return are the operations of a check, which fail if calls differ."""

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


Variable = Any


class StepOptimizer(StepOptimizerBase):
    """One of the optimizers that a task's own step is given.

    The Keras optimizer itself refuses to be applied from now on.

    Args:
        calls: those of the step so far, of all its optimizers.
        factor: what the learning rate is multiplied by.
    """

    def __init__(
        self,
        name: str,
        optimizer: keras.optimizers.Optimizer,
        fields: Sequence[Field],
        config: Config,
        calls: Calls,
        *,
        factor: float,
        workers: TracedWorkers,
    ) -> None:
        super().__init__(name, config, calls)
        self.variables: list[Variable] = [field.variable for field in fields]
        self._optimizer = optimizer
        self._apply = optimizer.apply
        self._fields = list(fields)
        self._factor = factor
        self._workers = workers
        self._new_reducer = partial(choose_reducer, config, workers)
        self._zero = tf.Variable(0.0, trainable=False, name="zero")
        self._graph: Any = None

        def refuse(*_: Any, **__: Any) -> None:
            raise stepped_alone(name)

        vars(optimizer)["apply"] = refuse

    @property
    def learning_rate(self) -> Tensor:
        """The learning rate of this step."""
        rate = self._of_step().learning_rate
        if rate is None:
            return tf.convert_to_tensor(self._optimizer.learning_rate)
        return rate if self._factor == 1 else rate * self._factor

    def gradients(self, losses: Any, tape: tf.GradientTape | None = None) -> list[Tensor]:
        """Collective. Return the mean gradient over the global batch, one tensor for each variable."""
        samples = self._outside_of_branches()
        check_values({f"what is given to the optimizer {self._name!r}": losses}, samples.weights.shape[0])
        if tape is None:
            raise TaskError(
                f"the optimizer {self._name!r} was given losses without the tape that recorded them",
                "Compute the losses under `with tf.GradientTape() as tape:` and give the tape after them.",
            )
        target, own = _target_and_own_weights(losses, samples)
        weights = samples.gradient_weights if own is None else samples.gradient_weights * own
        scale = own_scale(self._optimizer)
        weights = weights if scale is None else weights * scale
        weights = tf.cast(weights if target.shape.rank else tf.reduce_sum(weights), target.dtype)
        found = tape.gradient(target, [native(variable) for variable in self.variables], weights)
        self._note_unused(found)
        gradients = dense(found, self.variables, self._zero)
        reduced = gradients if samples.learning_rate is None else self._reduced(gradients, own, samples)
        return unscaled(reduced, scale)

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Clip the gradients, set the learning rate and take a step."""
        samples = self._outside_of_branches()
        found = [tuple(g.shape) if hasattr(g, "shape") else None for g in gradients]
        check_gradients(self._name, found, [tuple(variable.shape) for variable in self.variables])
        self.is_applied = True
        if samples.learning_rate is None:
            return
        clipped = list(gradients) if self._clip_norm is None else clip_by_norm(gradients, self._clip_norm)
        # parameters change after every reduction has succeeded
        with tf.control_dependencies([tf.group(*clipped)]):
            self._optimizer.learning_rate.assign(self.learning_rate)
            self._apply(scaled(clipped, own_scale(self._optimizer)), self.variables)

    def begin(self, samples: StepPart | None) -> None:
        """Begin a step with these samples; None if no step is being done. Local: no collective."""
        super().begin(samples)
        self._graph = _graph()

    def _outside_of_branches(self) -> StepPart:
        samples = self._of_step()
        if _graph() is not self._graph:
            raise TaskError(
                f"the optimizer {self._name!r} was used inside of tf.cond, tf.while_loop or a tf.function: "
                "if workers took different branches, they would wait for each other",
                "Decide and loop in Python, such as `if optimizers.step % 5 == 0:`.",
            )
        return samples

    def _note_unused(self, found: Sequence[Tensor | None]) -> None:
        missed = [field.name for field, g in zip(self._fields, found, strict=True) if g is None]
        check_reached(self._name, len(missed) < len(self._fields))
        known, self._own_calls = self._own_calls > 0, self._own_calls + 1
        self.unused = [name for name in missed if not known or name in self.unused]

    def _reduced(self, gradients: list[Tensor], own: Tensor | None, samples: StepPart) -> list[Tensor]:
        """Collective. Return the sums of gradients over workers, divided by the share that counted.

        Calls are distinguished by name, for Horovod, and by a mark, without which TensorFlow would merge
        reductions of equal gradients.
        """
        call = f"{self._name}.{self._own_calls - 1}"
        mark = {"_hvdtrain_call": AttrValue(s=call.encode())}
        reducer = self._new_reducer()
        reducer.attach({field.path: field.variable for field in self._fields})
        checks = self._calls.announce(self._name, is_weighted=own is not None)
        with tf.control_dependencies(checks), tf.name_scope(call), _graph()._attr_scope(mark):
            summed, _ = reducer.finish(gradients)
            if own is None:
                return summed
            counted = tf.linalg.matvec(own[tf.newaxis], samples.weights)[0]
            if self._workers.may_reduce:
                counted = hvd.allreduce(counted, op=hvd.Sum, name="hvdtrain.counted")
        return normalized(summed, counted, samples.total_weight)


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


def _target_and_own_weights(losses: Any, samples: StepPart) -> tuple[Tensor, Tensor | None]:
    """Return what is differentiated, and each sample's own weight; None if the losses have none."""
    if not isinstance(losses, Weighted):
        return tf.convert_to_tensor(losses), None
    values = tf.convert_to_tensor(losses.values)
    weights = tf.stop_gradient(tf.cast(losses.weights, samples.weights.dtype))
    if values.shape.rank == 0:  # a batch's mean: of each sample an equal part
        number = tf.shape(samples.weights)[0]
        weights = tf.fill([number], weights / tf.cast(number, weights.dtype))
    return values, weights
