"""How the TensorFlow backend calls steps and models, and what it computes with gradients."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers import layer as keras_layer
from numpy.typing import NDArray
from tensorflow.core.framework.attr_value_pb2 import AttrValue

from hvdtrain.backends.objective.logits import bad_target
from hvdtrain.backends.objective.losses import Weighted
from hvdtrain.backends.tensorflow.batches import Signature, TensorFlowBatch
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError
from hvdtrain.workers.seeding import random_state_kept

Tensor = Any
# whether a trace that was made at one step computes what another step needs
Guard = Callable[[int], bool]


class Compiled:
    """A step, compiled once for each signature of its batches, which ``tf.function`` finds out slowly."""

    def __init__(self, step: Callable[..., Tensor], trace: Callable[[], Any]) -> None:
        self._step, self._trace = step, trace
        # for each signature: what a step's number must fulfil, the compiled step, and what its trace gave
        self._known: dict[Signature, list[tuple[list[Guard], Callable[..., Tensor], Any]]] = {}

    def __call__(self, batch: TensorFlowBatch, *arguments: Any) -> tuple[Tensor, Any]:
        """Run the step as it was compiled for such batches; return its result and its trace's."""
        known = self._known.setdefault(batch.signature, [])
        for guards, function, trace in known:
            if not guards or all(guard(batch.step) for guard in guards):
                return run_compiled(function, *arguments), trace
        with random_state_kept():  # those of the step
            guards, function = self._compiled(batch, arguments)
        known.append((guards, function, self._trace()))
        return run_compiled(function, *arguments), known[-1][2]

    def _compiled(self, batch: TensorFlowBatch, arguments: Sequence[Any]) -> tuple[list[Guard], Any]:
        parts = tuple(arguments[:3])
        if batch.signature[0][0][0] is None:  # the trace is to serve any number of micro-batches
            parts = tf.nest.map_structure(lambda t: tf.TensorSpec((None, *t.shape[1:]), t.dtype), parts)
        function = tf.function(self._step, autograph=False)
        return [], function.get_concrete_function(*parts, *arguments[3:])


def with_micro_batches(batch: HostBatch, number: int) -> HostBatch:
    """Return a batch with this number of micro-batches, each of them the batch's first."""

    def repeated(array: NDArray[Any]) -> NDArray[Any]:
        return np.concatenate([array[:1]] * number)

    arrays = {name: repeated(array) for name, array in batch.arrays.items()}
    return replace(batch, arrays=arrays, weights=repeated(batch.weights), indices=repeated(batch.indices))


def run_compiled(function: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """Run a compiled step and return its result; a target that is out of range is named."""
    try:
        return function(*arguments)
    except tf.errors.InvalidArgumentError as error:
        raise bad_target(error) or error from None


def run_eagerly(compute: Callable[[], Any], can_repeat: Callable[[], bool]) -> Any:
    """Run a computation eagerly: that takes no trace, and errors name the user's own lines."""
    try:
        return compute()
    except TaskError:
        raise
    except Exception:
        if not can_repeat():
            raise
        with suppress(Exception):
            return tf.function(compute, autograph=False)()
        raise


def of_counted(counts: Sequence[int], function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of a micro-batch and weights that is given the samples that do not have weight 0."""

    def of_arrays(arrays: Any, weights: Tensor, *others: Tensor) -> Any:
        if not counts or counts[0] == weights.shape[0]:
            return function(arrays, weights, *others)

        def rows(tensor: Tensor) -> Tensor:
            return tf.ensure_shape(tf.boolean_mask(tensor, weights > 0), (counts[0], *tensor.shape[1:]))

        return function(*tf.nest.map_structure(rows, (arrays, weights, *others)))

    return of_arrays


def accumulated_gradients(
    gradients_of: Callable[..., tuple[list[Tensor], Tensor]],
    arrays: Mapping[str, Tensor],
    weights: Tensor,
    gradient_weights: Tensor,
    counts: Sequence[int] = (),
    *,
    apart: bool = False,
) -> tuple[list[Tensor], Tensor]:
    """Sum the gradients of the micro-batches in loops, so that the graph does not grow with them."""

    def add(own: Sequence[int], i: Tensor, gradients: list[Tensor], sums: Tensor) -> tuple[Any, ...]:
        more, more_sums = of_micro_batch(own, i)
        return i + 1, [a + b for a, b in zip(gradients, more, strict=True)], sums + more_sums

    def of_micro_batch(own: Sequence[int], i: Tensor) -> tuple[list[Tensor], Tensor]:
        micro_batch = {name: array[i] for name, array in arrays.items()}
        return of_counted(own, gradients_of)(micro_batch, weights[i], gradient_weights[i])

    number = tf.shape(weights)[0] if weights.shape[0] is None else weights.shape[0]
    ends = [i + 1 for i in range(len(counts)) if counts[i : i + 1] != counts[i + 1 : i + 2]]
    runs = [(counts[end - 1 : end], end) for end in ends] or [((), number)]
    gradients, sums = of_micro_batch(runs[0][0], tf.constant(0))
    # one at a time: the next would move the same statistics, under the same names between workers
    with tf.control_dependencies([*gradients, sums]):
        place = tf.constant(1)
    apart = apart and isinstance(number, int) and number > 1
    if apart:
        runs[-1] = runs[-1][0], number - 1
    for own, end in runs[ends[:1] == [1] :]:
        before = (place, gradients, sums)
        place, gradients, sums = tf.while_loop(
            lambda i, *_, end=end: i < end, partial(add, own), before, parallel_iterations=1
        )
    if apart:
        with tf.control_dependencies([*gradients, sums]):
            place = tf.constant(number - 1)
        _, gradients, sums = add(runs[-1][0], place, gradients, sums)
    return gradients, sums


@contextmanager
def phase_of_layers(training: bool) -> Iterator[None]:
    """Return a context in which layers that a loss or step calls by themselves are in training or not."""
    plain = keras_layer.CallContext
    keras_layer.CallContext = type(plain.__name__, (plain,), {"training": training})
    try:
        yield
    finally:
        keras_layer.CallContext = plain


class Phase:
    """A model whose calls are in training or in evaluation, as ``model.train()`` has it in PyTorch.

    It is made for one evaluation of the objective, while that is traced, and collects the losses that the
    model adds to it: those of ``add_loss``, activity regularizers and the regularizers of weights.
    """

    def __init__(self, model: Any, training: bool) -> None:
        self._model = model
        self.__wrapped__ = model  # inspect.unwrap finds the model, whose signature says how it is called
        self._call = partial(model, training=training)
        self._of_earlier_calls: list[Tensor] = []
        self._are_losses_read = False
        model._clear_losses()  # tensors of another trace

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model in this phase."""
        layers = self._model._flatten_layers()
        self._of_earlier_calls += [loss for layer in layers for loss in layer._get_own_losses()]
        return self._call(*args, **kwargs)  # Keras clears the losses of the call before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    @property
    def losses(self) -> list[Tensor]:
        """The model's losses; an objective that reads them adds them itself."""
        self._are_losses_read = True
        return self._model.losses

    @property
    def has_losses_of_calls(self) -> bool:
        """Whether calls have added losses, which Keras computes of all rows: not those of weights."""
        own = [loss for layer in self._model._flatten_layers() for loss in layer._get_own_losses()]
        return bool(self._of_earlier_calls or own)

    def added_loss(self) -> Tensor | None:
        """Return the sum of the losses that the model adds, in fp32; None if there are none to add."""
        losses = [*self._of_earlier_calls, *self._model.losses]
        if self._are_losses_read or not losses:
            return None
        return tf.add_n([tf.reduce_sum(tf.cast(loss, tf.float32)) for loss in losses])


def add_to_loss(losses: Any, added: Tensor) -> Any:
    """Return a loss to which a number has been added for every sample, so that it counts once per step."""
    if isinstance(losses, Weighted):
        return Weighted(add_to_loss(losses.values, added), losses.weights)
    losses = tf.convert_to_tensor(losses)
    kind = tf.float64 if losses.dtype == tf.float64 else tf.float32
    return tf.cast(losses, kind) + tf.cast(added, kind)


def joined(sums: Tensor, *parts: Any) -> Tensor:
    """Return one vector of the type of the sums."""
    return tf.concat([sums, *(tf.cast(part, sums.dtype) for part in parts)], 0)


def native(variable: Any) -> Any:
    """Return TensorFlow's own variable of a Keras one."""
    return variable.value if isinstance(variable, keras.Variable) else variable


def marked(name: str, key: str = "_hvdtrain_gradient") -> Any:
    """Return a context for a collective of this name, while a step is traced.

    Without a mark of its own, TensorFlow merges those of tensors that are equal on this worker, for which
    others that have two would wait.
    """
    return tf.compat.v1.get_default_graph()._attr_scope({key: AttrValue(s=name.encode())})


def dense(gradients: Sequence[Tensor], parameters: Sequence[Any], zero: Tensor) -> list[Tensor]:
    """Return every gradient as a dense tensor of its parameter's shape, zeros in place of one that is None.

    The shape must be known when the step is traced: a gradient of unknown shape is reduced by itself, for
    which another worker, whose trace does not reach that parameter, would wait.

    The zeros come from a variable: of constant zeros, TensorFlow would work out the all-reduce when it
    compiles the step, waiting for workers whose gradients are not constant.
    """
    return [
        tf.fill(v.shape, tf.cast(zero.read_value(), v.dtype)) if g is None else _dense(g, v.shape)
        for g, v in zip(gradients, parameters, strict=True)
    ]


def _dense(gradient: Tensor, shape: Any) -> Tensor:
    found = tf.convert_to_tensor(gradient)
    return found if found.shape.is_fully_defined() else tf.ensure_shape(found, shape)


def clip_by_norm(gradients: Sequence[Tensor], clip_norm: float) -> tuple[list[Tensor], Tensor]:
    """Scale gradients to a joint norm of at most that, as torch.nn.utils; return also what it was."""
    norm = tf.sqrt(tf.add_n([tf.reduce_sum(tf.square(g)) for g in gradients]))
    return scaled_to_norm(gradients, norm, clip_norm), norm


def scaled_to_norm(gradients: Sequence[Tensor], norm: Tensor, clip_norm: float) -> list[Tensor]:
    """Return gradients, whose joint norm is given, scaled so that it is at most ``clip_norm``."""
    factor = tf.minimum(tf.ones((), norm.dtype), clip_norm / (norm + 1e-6))
    return [gradient * tf.cast(factor, gradient.dtype) for gradient in gradients]
