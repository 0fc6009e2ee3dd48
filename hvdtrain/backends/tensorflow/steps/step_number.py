"""The number of a step in a task's own step, which is traced: to decide by as an int, else a tensor."""

import operator
from collections.abc import Callable, Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import tensorflow as tf

from hvdtrain.backends.tensorflow.batches import Signature, TensorFlowBatch
from hvdtrain.backends.tensorflow.functions import native, run_compiled
from hvdtrain.backends.workers import first_line
from hvdtrain.errors import TaskError
from hvdtrain.workers.seeding import random_state_kept

Graph = Any
Tensor = Any

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


# whether a trace that was made at one step computes what another step needs
Guard = Callable[[int], bool]

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


class CompiledByStep:
    """A task's own step, compiled once for each signature of its batches and each way that it decides."""

    def __init__(
        self,
        step: Callable[..., Tensor],
        trace: Callable[[], Any],
        variables: Sequence[Any],
        error_of: Callable[[Exception], TaskError | None],
    ) -> None:
        self._error_of = error_of
        self._step = step
        self._trace = trace
        self._variables = variables
        self._known: dict[Signature, list[tuple[list[Guard], Callable[..., Tensor], Any]]] = {}

    def __call__(self, batch: TensorFlowBatch, *arguments: Any) -> tuple[Tensor, Any]:
        """Run the step as it was compiled for these decisions; return its result and its trace's."""
        step, known = batch.step, self._known.setdefault(batch.signature, [])
        number = tf.constant(np.asarray(step, np.int64))
        for guards, function, trace in known:
            if all(guard(step) for guard in guards):
                return self._run(function, number, *arguments), trace
        if len(known) == MAX_TRACES:
            raise TaskError(
                f"tf_step decides by optimizers.step in more than {MAX_TRACES} different ways, and is traced "
                "anew for each of them",
                f"Decide by fewer comparisons. {_REMEDY}",
                everywhere=True,
            )
        guards = []

        def traced(tensor: Tensor, *tensors: Tensor) -> Tensor:
            guards.clear()
            return self._step(StepNumber(step, tensor, guards), *tensors)

        try:
            with random_state_kept():  # those of the step
                function = tf.function(traced, autograph=False).get_concrete_function(number, *arguments)
        except tf.errors.OperatorNotAllowedInGraphError as error:
            raise TaskError(
                f"tf_step decides in Python by a tensor: {first_line(error)}",
                "A step is traced once for many batches, and workers have different ones. Decide by "
                "optimizers.step, or choose between values with tf.where.",
                everywhere=True,
            ) from error
        check_graph(function.graph, self._variables)
        known.append((guards, function, self._trace()))
        return self._run(function, number, *arguments), known[-1][2]

    def _run(self, function: Callable[..., Tensor], *arguments: Any) -> Tensor:
        try:
            return run_compiled(function, *arguments)
        except tf.errors.InvalidArgumentError as error:
            raise self._error_of(error) or error from None
