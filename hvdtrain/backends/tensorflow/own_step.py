"""A task's own training step in TensorFlow: the optimizers that it is given, and how it is run.

``torch/own_step.py`` does the same for PyTorch; the rules are in ``backends/own_step.py``.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import horovod.tensorflow as hvd
import keras
import tensorflow as tf
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from hvdtrain.backends.base import OwnRates
from hvdtrain.backends.counting import Weighted
from hvdtrain.backends.named_optimizers import check_named_optimizers, check_owners, combined_rates
from hvdtrain.backends.own_step import (
    NotCalled,
    Optimizers,
    Step,
    check_gradients,
    check_losses,
    check_reached,
    different_calls,
    different_metrics,
    different_weighting,
    metrics_code,
    outside_of_step,
    stepped_alone,
)
from hvdtrain.backends.tensorflow.functions import Phase, clip_by_norm, dense, native, normalized
from hvdtrain.backends.tensorflow.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.optimizers import take_own_rates
from hvdtrain.backends.tensorflow.reduction import choose_reducer
from hvdtrain.backends.tensorflow.step_number import StepNumber
from hvdtrain.backends.tensorflow.weighting import check_values
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

Tensor = Any
Variable = Any
NamedOptimizers = dict[str, tuple[keras.optimizers.Optimizer, list[Field]]]

# how the message of a step begins whose workers' calls differ
_DIFFERENT_CALLS = "hvdtrain.own_step:"


class StepPart(NamedTuple):
    """The samples of a step on one worker, and what an update with them needs.

    Attributes:
        weights: (samples,).
        gradient_weights: (samples,): each sample's part in the mean gradient over the global batch.
        total_weight: sum of the samples' weights over all workers.
        learning_rate: that of the step; None in a dry run, which neither reduces nor updates anything.
    """

    weights: Tensor
    gradient_weights: Tensor
    total_weight: Tensor
    learning_rate: Tensor | None


def make_optimizers(task: Any, model: keras.Model, tensors: ModelState) -> NamedOptimizers:
    """Make the optimizers of a task that names several, each with the parameters that it trains.

    Args:
        task: the task, which has ``tf_optimizers``.
        model: the model.
        tensors: the model's variables.

    Raises:
        TaskError: If it gives something else, or not exactly one of them trains each trainable parameter.
    """
    method, given = "tf_optimizers", task.tf_optimizers(model)
    pairs = given if isinstance(given, Mapping) else {}
    for name, pair in pairs.items():
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], list | tuple)):
            raise TaskError(
                f"{method}(model) must give an optimizer and the list of the variables that it trains as "
                f"{name!r}, found a {type(pair).__name__}",
                f'Return {{"{name}": (keras.optimizers.Adam(1e-4), model.{name}.trainable_variables)}}, for '
                "example.",
            )
    optimizers = {name: pair[0] for name, pair in pairs.items()} or given
    by_name = check_named_optimizers(optimizers, keras.optimizers.Optimizer, method)
    if len(set(map(id, by_name.values()))) < len(by_name):
        raise TaskError(f"{method}(model) gave one optimizer under two names", "Make one for each name.")
    known = {id(field.variable) for field in tensors.fields}
    fields = {id(field.variable): field for field in tensors.trainable_fields()}
    variables = {name: {id(v): v for v in pairs[name][1]} for name in by_name}
    owned = {name: [fields[i] for i in ids if i in fields] for name, ids in variables.items()}
    check_owners(
        method,
        [field.name for field in fields.values()],
        {name: [field.name for field in of_one] for name, of_one in owned.items()},
        {
            name: sum(v.trainable and i not in known for i, v in ids.items())
            for name, ids in variables.items()
        },
    )
    return {name: (optimizer, owned[name]) for name, optimizer in by_name.items()}


def take_rates(
    optimizers: Mapping[str, keras.optimizers.Optimizer], method: str
) -> tuple[OwnRates, dict[str, float]]:
    """Return the learning rates of a task's optimizers, and what the largest is multiplied by for each.

    Args:
        optimizers: the optimizers, by name.
        method: the task's method that made them.

    Raises:
        TaskError: as ``take_own_rates``.
    """
    return combined_rates({name: take_own_rates(one, method) for name, one in optimizers.items()})


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


class StepOptimizer(NotCalled):
    """One of the optimizers that a task's own step is given.

    The Keras optimizer itself refuses to be applied from now on.

    Args:
        name: its name.
        optimizer: the Keras optimizer, built.
        fields: the parameters that it trains.
        config: the config.
        calls: those of the step so far, of all its optimizers.
        factor: what the learning rate is multiplied by.
        size: number of workers.

    Attributes:
        variables: the parameters that it trains, in the order of the gradients.
        unused: names of the parameters that no call of this step has reached; empty without a call.
        is_applied: whether ``apply`` was called in this step.
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
        size: int,
    ) -> None:
        self.variables: list[Variable] = [field.variable for field in fields]
        self.unused: list[str] = []
        self.is_applied = False
        self._name = name
        self._optimizer = optimizer
        self._apply = optimizer.apply
        self._fields = list(fields)
        self._clip_norm = config.clip_norm
        self._factor = factor
        self._size = size
        self._new_reducer = partial(choose_reducer, config, size)
        self._calls = calls
        self._own_calls = 0
        self._zero = tf.Variable(0.0, trainable=False, name="zero")
        self._samples: StepPart | None = None
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
        """Collective. Return the mean gradient over the global batch, one tensor for each variable.

        Args:
            losses: one value per sample, or ``Weighted``, computed under the tape.
            tape: the tape.
        """
        samples = self._of_step(is_collective=True)
        check_losses(losses, self._name)
        check_values({f"what is given to the optimizer {self._name!r}": losses}, samples.weights.shape[0])
        if tape is None:
            raise TaskError(
                f"the optimizer {self._name!r} was given losses without the tape that recorded them",
                "Compute the losses under `with tf.GradientTape() as tape:` and give the tape after them.",
            )
        target, own = _target_and_own_weights(losses, samples)
        weights = samples.gradient_weights if own is None else samples.gradient_weights * own
        weights = tf.cast(weights if target.shape.rank else tf.reduce_sum(weights), target.dtype)
        found = tape.gradient(target, [native(variable) for variable in self.variables], weights)
        self._note_unused(found)
        gradients = dense(found, self.variables, self._zero)
        return gradients if samples.learning_rate is None else self._reduced(gradients, own, samples)

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Clip the gradients, set the learning rate and take a step.

        Args:
            gradients: those of ``gradients``, or computed from them.
        """
        samples = self._of_step(is_collective=True)
        found = [tuple(g.shape) if hasattr(g, "shape") else None for g in gradients]
        check_gradients(self._name, found, [tuple(variable.shape) for variable in self.variables])
        self.is_applied = True
        if samples.learning_rate is None:
            return
        clipped = list(gradients) if self._clip_norm is None else clip_by_norm(gradients, self._clip_norm)
        with tf.control_dependencies(clipped):  # parameters change after every reduction has succeeded
            self._optimizer.learning_rate.assign(self.learning_rate)
            self._apply(clipped, self.variables)

    def minimize(self, losses: Any, tape: tf.GradientTape | None = None) -> None:
        """Collective. Compute the gradients of the losses and apply them; see ``gradients``."""
        self.apply(self.gradients(losses, tape))

    def apply_gradients(self, *_: Any, **__: Any) -> None:
        """Refuse to take a step with gradients of this worker alone."""
        raise stepped_alone(self._name)

    def begin(self, samples: StepPart | None) -> None:
        """Begin a step with these samples; None if no step is being done. Local: no collective."""
        self._samples, self._graph = samples, _graph()
        self._own_calls = 0
        if samples is not None:
            self.unused, self.is_applied = [], False

    def _of_step(self, is_collective: bool = False) -> StepPart:
        if self._samples is None:
            raise outside_of_step(self._name)
        if is_collective and _graph() is not self._graph:
            raise TaskError(
                f"the optimizer {self._name!r} was used inside of tf.cond, tf.while_loop or a tf.function: "
                "if workers took different branches, they would wait for each other",
                "Decide and loop in Python, such as `if optimizers.step % 5 == 0:`.",
            )
        return self._samples

    def _note_unused(self, found: Sequence[Tensor | None]) -> None:
        missed = [field.name for field, g in zip(self._fields, found, strict=True) if g is None]
        check_reached(self._name, len(missed) < len(self._fields))
        known, self._own_calls = self._own_calls > 0, self._own_calls + 1
        self.unused = [name for name in missed if not known or name in self.unused]

    def _reduced(self, gradients: list[Tensor], own: Tensor | None, samples: StepPart) -> list[Tensor]:
        """Collective. Return the sums of gradients over workers, divided by the share that counted.

        Calls are told apart by name, for Horovod, and by a mark, without which TensorFlow would merge
        reductions of equal gradients.
        """
        call = f"{self._name}.{self._own_calls - 1}"
        mark = {"_hvdtrain_call": AttrValue(s=call.encode())}
        reducer = self._new_reducer()
        reducer.attach({field.path: field.variable for field in self._fields})
        checks = self._calls.announce(self._name, is_weighted=own is not None)
        with tf.control_dependencies(checks), tf.name_scope(call), _graph()._attr_scope(mark):
            summed = reducer.finish(gradients)
            if own is None:
                return summed
            counted = tf.linalg.matvec(own[tf.newaxis], samples.weights)[0]
            if self._size > 1:
                counted = hvd.allreduce(counted, op=hvd.Sum, name="hvdtrain.counted")
        return normalized(summed, counted, samples.total_weight)


class OwnStep:
    """A task's own training step.

    Args:
        step: what the task does in a step.
        optimizers: its optimizers, by name, built, with the parameters that they train.
        factors: what the learning rate of each is multiplied by, if not by 1.
        config: the config.
        size: number of workers.
    """

    def __init__(
        self,
        step: Step,
        optimizers: NamedOptimizers,
        factors: Mapping[str, float],
        config: Config,
        *,
        size: int,
    ) -> None:
        self._step = step
        self._size = size
        self._calls = Calls(list(optimizers), size)
        self._optimizers = {
            name: StepOptimizer(
                name, optimizer, fields, config, self._calls, factor=factors.get(name, 1.0), size=size
            )
            for name, (optimizer, fields) in optimizers.items()
        }
        self._given = Optimizers(self._optimizers)

    def begin(self, samples: StepPart | None = None) -> None:
        """Begin a step; without samples, forget whatever one that failed has begun. Local: no collective."""
        self._calls.begin()
        for optimizer in self._optimizers.values():
            optimizer.begin(samples)

    def run(
        self, phase: Phase, batch: Mapping[str, Tensor], number: StepNumber, samples: StepPart
    ) -> tuple[Any, dict[str, Any]]:
        """Collective. Do the task's step and return its loss and its metrics.

        In a dry run, which has no learning rate, nothing is reduced or updated.

        Args:
            phase: the model.
            batch: the samples.
            number: the number of the step.
            samples: their weights, and what else an update needs.
        """
        self._given.step = number
        self.begin(samples)
        try:
            result = self._step(phase, batch, self._given)
        finally:
            for optimizer in self._optimizers.values():
                optimizer.begin(None)
        if phase.added_loss() is not None:
            raise TaskError(
                "the model adds losses of its own (add_loss or regularizers), and the task's own step does "
                "not read them",
                "Add tf.add_n(model.losses) to the losses that are minimized.",
            )
        return result

    def unused(self) -> list[str]:
        """Return the names of the parameters that no gradient of the last step has reached."""
        return [name for optimizer in self._optimizers.values() for name in optimizer.unused]

    def not_applied(self) -> list[str]:
        """Return the optimizers that took no step in the last step."""
        return [name for name, optimizer in self._optimizers.items() if not optimizer.is_applied]

    def error_of(self, error: Exception) -> TaskError | None:
        """Return the error for workers whose calls differ, if that is what an exception of a step says."""
        return self._calls.error_of(error)

    def reduce(self, vector: Tensor, names: Sequence[str], weighted: Sequence[str]) -> Tensor:
        """Collective. Sum the step's vector over workers and return it.

        Args:
            vector: the sums of the loss and the metrics, and what follows them.
            names: "loss" and the metrics.
            weighted: those of them that are Weighted.
        """
        if self._size > 1:
            with tf.control_dependencies(self._calls.announce_end(names, weighted)):
                vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
        return vector


def _graph() -> Any:
    return tf.compat.v1.get_default_graph()


def _target_and_own_weights(losses: Any, samples: StepPart) -> tuple[Tensor, Tensor | None]:
    """Return what is differentiated, and each sample's own weight; None if the losses have none."""
    if not isinstance(losses, Weighted):
        return tf.convert_to_tensor(losses), None
    values = tf.convert_to_tensor(losses.values)
    weights = tf.stop_gradient(tf.cast(losses.weights, tf.float32))
    if values.shape.rank == 0:  # a batch's mean: of each sample an equal part
        number = tf.shape(samples.weights)[0]
        weights = tf.fill([number], weights / tf.cast(number, tf.float32))
    return values, weights
