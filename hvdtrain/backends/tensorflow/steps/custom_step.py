"""A task's own training step; ``torch/`` has the same, and ``backends/custom_step.py`` the rules."""

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial, partialmethod
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.custom_step import CallsBase, CustomStepRules, StepOptimizerBase, StepPart
from hvdtrain.backends.step_metrics import findings
from hvdtrain.backends.tensorflow.batches import TensorFlowBatch, TracedWorkers
from hvdtrain.backends.tensorflow.functions import (
    Compiled,
    Guard,
    Phase,
    clip_by_norm,
    dense,
    joined,
    marked,
    native,
    of_counted,
)
from hvdtrain.backends.tensorflow.probes import values_of_first
from hvdtrain.backends.tensorflow.steps.plain_step import Parts, PlainStep
from hvdtrain.backends.tensorflow.steps.update import own_scale, scaled, unscaled
from hvdtrain.backends.workers import first_line
from hvdtrain.errors import TaskError

Graph = Any
Tensor = Any
Variable = Any


# operations that draw from generators of their own, which start anew with each process
_RANDOM = frozenset(
    {
        *("RandomStandardNormal", "RandomUniform", "RandomUniformInt", "TruncatedNormal", "RandomShuffle"),
        *("RandomGamma", "RandomPoisson", "RandomPoissonV2", "Multinomial", "ParameterizedTruncatedNormal"),
    }
)
_WRITES = ("Assign", "ResourceApply", "ResourceScatter", "ResourceSparseApply")


def check_graph(graph: Graph, variables: Sequence[Any]) -> None:
    """Check that a step changes only what is saved and draws only what is seeded by the step."""
    own = {id(native(variable).handle) for variable in variables}
    captured = {id(inside): outside for outside, inside in graph.captures}
    for operation in graph.get_operations():
        if operation.type in _RANDOM:
            raise TaskError(
                f"tf_step draws random numbers with {operation.type} ({operation.name}): workers would draw "
                "the same ones, and a resumed run others",
                "Return them from the data set, or give the model a keras.random.SeedGenerator and call "
                "keras.random.normal(shape, seed=model.seed_generator), for example.",
                everywhere=True,
            )
        for tensor in operation.inputs if operation.type.startswith(_WRITES) else ():
            outside = captured.get(id(tensor))
            # a large constant is captured, too
            if outside is not None and tensor.dtype == tf.resource and id(outside) not in own:
                name = next((v.name for v in graph.variables if v.handle is outside), "a variable")
                raise TaskError(
                    f"tf_step changes {name!r}, which is not a variable of the model: it would not be saved",
                    "Make it a weight of the model: self.add_weight(..., trainable=False).",
                    everywhere=True,
                )


MAX_TRACES = 16  # for batches of one form; each takes seconds and memory
_REMEDY = (
    "Compare it, as in `if optimizers.step % 5 == 0`, or compute with it as a tensor, as in "
    "tf.cast(optimizers.step, tf.float32)."
)


class StepNumber:
    """The number of a step, counted from 0, or a number that was computed of it with integers.

    A comparison gives a Python bool and is remembered with its answer, as a guard: the step is traced once
    for each set of answers, not once for each number. Everything else gives a tensor.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: int, tensor: Any = None, guards: Any = None, of_step: Any = int) -> None:
        self._value = value
        self.tensor = tf.constant(value, tf.int64) if tensor is None else tensor
        self._guards: list[Guard] = [] if guards is None else guards  # where the answers are remembered
        self._of_step: Callable[[int], int] = of_step  # how the number follows from the step's

    def __rsub__(self, other: Any) -> Any:
        return self * -1 + other

    def __truediv__(self, other: Any) -> Tensor:
        return tf.cast(self.tensor, tf.float32) / other

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __index__(self) -> int:
        raise TypeError(f"optimizers.step is not an int: tf_step is traced once for many steps. {_REMEDY}")

    def _computed(self, other: Any, operation: Callable[[Any, Any], Any]) -> Any:
        if not isinstance(other, int):
            kind = tf.float32 if isinstance(other, float) else tf.convert_to_tensor(other).dtype
            return operation(tf.cast(self.tensor, kind), other)
        of_step, tensor = self._of_step, operation(self.tensor, tf.constant(other, tf.int64))
        value = operation(self._value, other)
        return StepNumber(value, tensor, self._guards, lambda step: operation(of_step(step), other))

    def _answer(self, other: Any, compares: Callable[[Any, Any], Any]) -> Any:
        if not isinstance(other, int | float):
            return compares(self.tensor, tf.cast(other, self.tensor.dtype))
        answer, of_step = bool(compares(self._value, other)), self._of_step
        self._guards.append(lambda step: bool(compares(of_step(step), other)) == answer)
        return answer

    __add__ = __radd__ = partialmethod(_computed, operation=operator.add)
    __mul__ = __rmul__ = partialmethod(_computed, operation=operator.mul)
    __sub__ = partialmethod(_computed, operation=operator.sub)
    __floordiv__ = partialmethod(_computed, operation=operator.floordiv)
    __mod__ = partialmethod(_computed, operation=operator.mod)
    __eq__ = partialmethod(_answer, compares=operator.eq)
    __ne__ = partialmethod(_answer, compares=operator.ne)
    __lt__ = partialmethod(_answer, compares=operator.lt)
    __le__ = partialmethod(_answer, compares=operator.le)
    __gt__ = partialmethod(_answer, compares=operator.gt)
    __ge__ = partialmethod(_answer, compares=operator.ge)


tf.register_tensor_conversion_function(
    StepNumber, lambda value, dtype=None, **_: value.tensor if dtype is None else tf.cast(value.tensor, dtype)
)


class CompiledByStep(Compiled):
    """A task's own step, compiled once for each signature of its batches and each way that it decides."""

    def __init__(
        self, step: Callable[..., Tensor], trace: Callable[[], Any], variables: Sequence[Any]
    ) -> None:
        super().__init__(step, trace)
        self._variables = variables

    def _compiled(self, batch: TensorFlowBatch, arguments: Sequence[Any]) -> tuple[list[Guard], Any]:
        if len(self._known[batch.signature]) == MAX_TRACES:
            raise TaskError(
                f"tf_step decides by optimizers.step in more than {MAX_TRACES} ways, each a trace of its own",
                f"Decide by fewer comparisons. {_REMEDY}",
                everywhere=True,
            )
        guards: list[Guard] = []

        def traced(tensor: Tensor, *tensors: Tensor) -> Tensor:
            guards.clear()
            return self._step(StepNumber(batch.step, tensor, guards), *tensors)

        try:
            function = tf.function(traced, autograph=False).get_concrete_function(*arguments)
        except tf.errors.OperatorNotAllowedInGraphError as error:
            raise TaskError(
                f"tf_step decides in Python by a tensor: {first_line(error)}",
                "Decide by optimizers.step, which all workers have, or choose between values with tf.where.",
                everywhere=True,
            ) from error
        check_graph(function.graph, self._variables)
        return guards, function


# how the message of a step begins whose workers' calls differ
_DIFFERENT_CALLS = "hvdtrain.own_step:"


class Calls(CallsBase):
    """The calls of a step; what they return are the operations of a check, which fail if calls differ."""

    def __init__(self, workers: TracedWorkers) -> None:
        super().__init__(workers)
        self._errors: list[TaskError] = []  # of all steps traced so far, by what their messages give
        self._zero = tf.Variable(0.0, trainable=False, name="zero", dtype=tf.float64)

    def error_of(self, error: Exception) -> TaskError | None:
        """Return the error for workers whose calls differ, if that is what an exception of a step says."""
        _, found, rest = str(error).partition(_DIFFERENT_CALLS)
        return self._errors[int(rest.split(":")[0])] if found else None

    def _compare(self, codes: list[float], different: TaskError) -> list[Any]:
        if not self._workers.may_reduce:
            return []
        # with a variable, as TensorFlow would work out the sum of constants when it compiles the step
        own = tf.constant(codes, tf.float64) + self._zero.read_value()
        summed = hvd.allreduce(own, op=hvd.Sum, name=f"hvdtrain.own_step.{self.number}")
        is_equal = tf.reduce_all(tf.equal(summed, own * tf.cast(self._workers.size, tf.float64)))
        self._errors.append(different)
        return [tf.debugging.Assert(is_equal, [f"{_DIFFERENT_CALLS}{len(self._errors) - 1}:"])]


class StepOptimizer(StepOptimizerBase):
    """One of the optimizers that a task's own step is given."""

    def __init__(self, name: str, parts: Parts, calls: Calls, workers: TracedWorkers) -> None:
        super().__init__(name, parts.config, calls, workers)
        self._optimizer, self._fields = parts.optimizers[name], parts.owned[name]
        applies = self._optimizer.apply

        def apply(*arguments: Any, **named: Any) -> Any:
            self._check_step()
            return applies(*arguments, **named)

        vars(self._optimizer)["apply"] = apply
        self._factor = parts.factors.get(name, 1.0)
        self.variables: list[Variable] = [field.variable for field in self._fields]
        self._zero = tf.Variable(0.0, trainable=False, name="zero")
        self._graph: Any = None

    @property
    def learning_rate(self) -> Tensor:
        """The learning rate of this step."""
        rate = self._of_step().learning_rate
        if rate is None:
            return tf.convert_to_tensor(self._optimizer.learning_rate)
        return rate if self._factor == 1 else rate * self._factor

    def gradients(self, losses: Any, tape: tf.GradientTape | None = None) -> list[Tensor]:
        """Collective. Return the mean gradient over the global batch, one tensor for each variable."""
        samples = self._of_call()
        self._check_losses(losses, samples.weights.shape[0])
        if tape is None:
            raise TaskError(
                f"the optimizer {self._name!r} was given losses without the tape that recorded them",
                "Compute the losses under `with tf.GradientTape() as tape:` and give the tape after them.",
            )
        scale = own_scale(self._optimizer)
        (weights,) = scaled([samples.gradient_weights], scale)
        wanted = [native(variable) for variable in self.variables]
        found = tape.gradient(losses, wanted, tf.cast(weights, losses.dtype))
        self._note_unused([field.name for field in self._fields], found)
        gradients = dense(found, self.variables, self._zero)
        return unscaled(gradients if samples.learning_rate is None else self._reduced(gradients), scale)

    def _apply(self, gradients: Sequence[Tensor], _: StepPart) -> None:
        clipped = list(gradients)
        if self._clip_norm is not None:
            clipped, _ = clip_by_norm(gradients, self._clip_norm)
        # parameters change after every reduction has succeeded
        with tf.control_dependencies([tf.group(*clipped)]):
            self._optimizer.learning_rate.assign(self.learning_rate)
            self._optimizer.apply(scaled(clipped, own_scale(self._optimizer)), self.variables)

    def begin(self, samples: StepPart | None) -> None:
        super().begin(samples)
        self._graph = tf.compat.v1.get_default_graph()

    def _of_call(self) -> StepPart:
        samples = self._of_step()
        if tf.compat.v1.get_default_graph() is not self._graph:
            raise TaskError(
                f"the optimizer {self._name!r} was used inside of tf.cond, tf.while_loop or a tf.function: "
                "if workers took different branches, they would wait for each other",
                "Decide and loop in Python, such as `if optimizers.step % 5 == 0:`.",
            )
        return samples

    def _reduced(self, gradients: list[Tensor]) -> list[Tensor]:
        """Collective. Return the sums of gradients over workers.

        Calls are distinguished by name, for Horovod, and by a mark, without which TensorFlow would merge
        reductions of equal gradients.
        """
        call, reducer = f"{self._name}.{self._own_calls - 1}", self._new_reducer()
        reducer.attach({field.path: field.variable for field in self._fields})
        checks = self._calls.announce(f"gradients() of {self._name!r}")
        with tf.control_dependencies(checks), tf.name_scope(call), marked(call, "_hvdtrain_call"):
            return reducer.finish(gradients)[0]


class CustomStep(CustomStepRules, PlainStep):
    """A task's own training step: it calls the model and its optimizers as it likes."""

    kinds = Calls, StepOptimizer

    def attach(self, parts: Parts) -> None:
        kind, used = keras.optimizers.LossScaleOptimizer, parts.optimizers.values()
        plain = next((type(one).__name__ for one in used if not isinstance(one, kind)), "")
        if self.computation.precision == "fp16" and plain:
            raise TaskError(
                "layers of the model compute in float16 (mixed_float16), and nothing scales the losses of "
                "tf_step",
                f"Give keras.optimizers.LossScaleOptimizer({plain}(...)) as the task's optimizer, or use "
                "mixed_bfloat16.",
            )
        super().attach(parts)

    def trace(self) -> None:
        self.computation.trace()
        changing = [*self.changed_early(), *self.computation.seed_states]
        others = self.computation.learnt, changing
        self._function = cache(lambda counts: CompiledByStep(partial(self._traced, counts), *others))

    def changed_early(self) -> list[Any]:
        """Return the variables that a step changes before its last reduction."""
        parts = self.parts
        return [*self.computation.model.variables, *parts.slots, *parts.ema.to_broadcast()]

    def run(self, batch: TensorFlowBatch, learning_rate: float, signals: Sequence[float]) -> Any:
        function = self._function(batch.counts)
        number = tf.constant(np.asarray(batch.step, np.int64))
        try:
            found = function(batch, number, *self.arguments(batch, learning_rate, signals))
        except tf.errors.InvalidArgumentError as error:
            raise self._calls.error_of(error) or error from None
        self.parts.trained_set.look()
        return found

    def dry_run(self, batch: TensorFlowBatch, training: bool, draws: list[str]) -> dict[str, NDArray[Any]]:
        """Collective. Return the loss and the metrics of a batch's first micro-batch, by name."""
        if not training:
            return super().dry_run(batch, training, draws)

        def rows_of(micro_batch: Any, weights: Tensor, gradient_weights: Tensor) -> Tensor:
            part = StepPart(weights, gradient_weights, None)
            return self._rows(micro_batch, StepNumber(batch.step), part)

        return values_of_first(self.computation, batch, training, draws, rows_of)

    def forget(self) -> None:
        """Do nothing: a trace that fails has forgotten what it began."""

    def _traced(self, counts: tuple[int, ...], number: StepNumber, *tensors: Any) -> Tensor:
        """Collective. Do a step, while it is traced; the tensors are those of ``PlainStep``."""
        arrays, weights, gradient_weights, _, learning_rate, share, seeds, signals = tensors
        computation = self.computation
        computation.set_seeds(seeds)

        def sums_of(micro_batch: Any, weights: Tensor, gradient_weights: Tensor) -> Tensor:
            part = StepPart(weights, gradient_weights, learning_rate)
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
