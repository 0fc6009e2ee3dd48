"""A task's own training step; ``torch/`` has the same, and ``backends/custom_step.py`` the rules."""

from collections.abc import Mapping, Sequence
from functools import cache, partial
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from hvdtrain.backends.custom_step import (
    CallsBase,
    CustomStepRules,
    Optimizers,
    StepOptimizerBase,
    StepPart,
    check_gradients,
    own_step_of,
    stepped_alone,
)
from hvdtrain.backends.objective.losses import Weighted, check_values
from hvdtrain.backends.step_metrics import PendingVector, findings
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch, TensorFlowPending
from hvdtrain.backends.tensorflow.functions import (
    Phase,
    clip_by_norm,
    dense,
    joined,
    native,
    normalized,
    of_counted,
)
from hvdtrain.backends.tensorflow.precision import check_scaled, own_scale, scaled, unscaled
from hvdtrain.backends.tensorflow.probes import values_of_first
from hvdtrain.backends.tensorflow.steps.parts import Parts
from hvdtrain.backends.tensorflow.steps.plain_step import PlainStep
from hvdtrain.backends.tensorflow.steps.step_number import CompiledByStep, StepNumber
from hvdtrain.backends.tensorflow.traced_workers import TracedWorkers
from hvdtrain.errors import TaskError

Tensor = Any
Variable = Any

# how the message of a step begins whose workers' calls differ
_DIFFERENT_CALLS = "hvdtrain.own_step:"


class Calls(CallsBase):
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

    def _compare(self, number: int, codes: list[float], different: TaskError) -> list[Any]:
        if not self._workers.may_reduce:
            return []
        # with a variable, as TensorFlow would work out the sum of constants when it compiles the step
        own = tf.constant(codes, tf.float64) + self._zero.read_value()
        summed = hvd.allreduce(own, op=hvd.Sum, name=f"hvdtrain.own_step.{number}")
        is_equal = tf.reduce_all(tf.equal(summed, own * tf.cast(self._workers.size, tf.float64)))
        self._errors.append(different)
        return [tf.debugging.Assert(is_equal, [f"{_DIFFERENT_CALLS}{len(self._errors) - 1}:"])]


class StepOptimizer(StepOptimizerBase):
    """One of the optimizers that a task's own step is given.

    The Keras optimizer itself refuses to be applied from now on.
    """

    def __init__(self, name: str, parts: Parts, calls: Calls, workers: TracedWorkers) -> None:
        super().__init__(name, parts.config, calls, workers)
        self._optimizer, self._fields = parts.optimizers[name], parts.owned[name]
        self._factor = parts.factors.get(name, 1.0)
        self.variables: list[Variable] = [field.variable for field in self._fields]
        self._apply = self._optimizer.apply
        self._zero = tf.Variable(0.0, trainable=False, name="zero")
        self._graph: Any = None

        def refuse(*_: Any, **__: Any) -> None:
            raise stepped_alone(name)

        vars(self._optimizer)["apply"] = refuse

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
        self._note_unused([field.name for field in self._fields], found)
        gradients = dense(found, self.variables, self._zero)
        reduced = gradients if samples.learning_rate is None else self._reduced(gradients, own, samples)
        return unscaled(reduced, scale)

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Clip the gradients, set the learning rate and take a step."""
        samples = self._outside_of_branches()
        check_gradients(self._name, gradients, self.variables)
        self.is_applied = True
        if samples.learning_rate is None:
            return
        clipped = list(gradients)
        if self._clip_norm is not None:
            clipped, _ = clip_by_norm(gradients, self._clip_norm)
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


class CustomStep(CustomStepRules, PlainStep):
    """A task's own training step: it calls the model and its optimizers as it likes."""

    def attach(self, parts: Parts) -> None:
        """Take the parts of the step. Local: no collective."""
        check_scaled(self.computation.precision, list(parts.optimizers.values()))
        self.parts, workers = parts, self.computation.traced_workers
        self._step: Any = own_step_of(parts.task, parts.config)
        self._calls = Calls(list(parts.optimizers), workers)
        self._optimizers = {
            name: StepOptimizer(name, parts, self._calls, workers) for name in parts.optimizers
        }
        self._given = Optimizers(self._optimizers)
        self.trace()

    def trace(self) -> None:
        """Let what steps call be traced anew, when the next batch comes."""
        self.computation.trace()
        changing = [*self.changed_early(), *self.computation.seed_states]
        others = (self.computation.learnt, changing, self._calls.error_of)
        self._function = cache(lambda counts: CompiledByStep(partial(self._traced, counts), *others))

    def changed_early(self) -> list[Any]:
        """Return the variables that a step changes before its last reduction."""
        parts = self.parts
        return [*self.computation.model.variables, *parts.slots, *parts.ema.to_broadcast()]

    def train(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Collective. Do a step."""
        function = self._function(batch.counts if batch.is_padded else ())
        vector, (names, weighted, unused) = function(batch, *self.arguments(batch, learning_rate, signals))
        self.parts.trained_set.look()
        return TensorFlowPending(names, vector, batch.total_weight, unused, weighted)

    def dry_run(self, batch: TensorFlowBatch, training: bool, draws: list[str]) -> dict[str, NDArray[Any]]:
        """Collective. Return the loss and the metrics of a batch's first micro-batch, by name."""
        if not training:
            return super().dry_run(batch, training, draws)

        def rows_of(micro_batch: Any, weights: Tensor, gradient_weights: Tensor) -> Tensor:
            part = StepPart(weights, gradient_weights, batch.total, None)
            return self._rows(micro_batch, StepNumber(batch.step), part)

        return values_of_first(self.computation, batch, training, draws, rows_of)

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self._calls.begin()
        for optimizer in self._optimizers.values():
            optimizer.begin(None)

    def _traced(self, counts: tuple[int, ...], number: StepNumber, *tensors: Any) -> Tensor:
        """Collective. Do a step, while it is traced; the tensors are those of ``PlainStep``."""
        arrays, weights, gradient_weights, total_weight, learning_rate, share, seeds, signals = tensors
        computation = self.computation
        computation.set_seeds(seeds)

        def sums_of(micro_batch: Any, weights: Tensor, gradient_weights: Tensor) -> Tensor:
            part = StepPart(weights, gradient_weights, total_weight, learning_rate)
            return tf.linalg.matvec(self._rows(micro_batch, number, part), weights)

        sums = of_counted(counts, sums_of)(arrays, weights, gradient_weights)
        vector = joined(sums, findings(float(len(computation.unused))), signals)
        if self.computation.traced_workers.may_reduce:
            with tf.control_dependencies(self._calls.announce_end(computation.names, computation.weighted)):
                vector = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
        self.parts.ema.update(share)
        return vector

    def _rows(self, micro_batch: Any, number: StepNumber, part: StepPart) -> Tensor:
        """Collective. Do the task's step, or a dry run of it, and return the rows of its values."""
        run = partial(self._call, number=number, samples=part)
        rows = self.computation.per_sample(micro_batch, part.weights, True, run).rows
        self.computation.unused = [name for one in self._optimizers.values() for name in one.unused]
        return rows

    def _call(
        self, phase: Phase, batch: Mapping[str, Tensor], number: StepNumber, samples: StepPart
    ) -> tuple[Any, dict[str, Any]]:
        """Collective. Call the task's step and return its loss and its metrics."""
        with self._running(number, samples) as optimizers:
            result: tuple[Any, dict[str, Any]] = self._step(phase, batch, optimizers)
        if phase.added_loss() is not None:
            raise TaskError(
                "the model adds losses of its own (add_loss or regularizers), and the task's own step does "
                "not read them",
                "Add tf.add_n(model.losses) to the losses that are minimized.",
            )
        return result


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
