"""What a micro-batch takes of memory in TensorFlow; ``torch/activations.py`` finds the same for PyTorch.

A dry run computes eagerly, and keeps tensors that a step's graph does not: those of local variables of the
task and of Keras, and those that a gradient could need. So the operations are noted while they are done, with
what goes in and comes out, and the graph's memory follows from them: a tensor lives from the operation that
makes it to the last one that takes it, and operations that no gradient needs are left out.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.framework import op_callbacks

from hvdtrain.backends.options import MARK, no_blocks
from hvdtrain.backends.recording import largest_tensors
from hvdtrain.backends.records import StepMemory
from hvdtrain.backends.tensorflow.state.layouts import children

Layer = Any
Tensor = Any


def apply_activation_checkpointing(model: Layer) -> list[str]:
    """Let a model keep what goes into its blocks, and compute the rest again where it is needed.

    Returns:
        The names of the blocks.
    """
    blocks = dict(_marked(model)) or dict(_repeated(model))
    if not blocks:
        raise no_blocks("tf_model()", "keras.layers.Layer", "or use two or more of it in one place")
    for layer in {id(layer): layer for layer in blocks.values()}.values():
        layer.call = _recomputed(layer)
    return list(blocks)


def _marked(layer: Layer, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Return the outermost layers that say, or whose class says, that they are blocks."""
    for name, child in children(layer):
        inner = f"{path}/{name}" if path else name
        if getattr(child, MARK, False) is True:
            yield inner, child
        else:
            yield from _marked(child, inner)


def _repeated(layer: Layer, path: str = "") -> Iterator[tuple[str, Layer]]:
    """Return layers of a class that is not Keras's own, which a layer holds two or more of, with weights."""
    below = list(children(layer))
    alike: dict[type, set[int]] = {}
    for _, child in below:
        if child.weights and not type(child).__module__.startswith("keras."):
            alike.setdefault(type(child), set()).add(id(child))
    chosen = {key for keys in alike.values() if len(keys) > 1 for key in keys}
    for name, child in below:
        inner = f"{path}/{name}" if path else name
        if id(child) in chosen:
            yield inner, child
        else:
            yield from _repeated(child, inner)


def _recomputed(layer: Layer) -> Callable[..., Any]:
    """Return a forward pass that keeps nothing but its arguments; dropout draws the same again."""
    forward = layer.call
    generators = list(_generators(layer))
    statistics = list(layer.non_trainable_variables)
    is_repeating = False
    repeated_losses: list[Tensor] = []

    def call(*args: Any, **kwargs: Any) -> Any:
        leaves = keras.tree.flatten((args, kwargs))
        places = [i for i, leaf in enumerate(leaves) if tf.is_tensor(leaf) and leaf.dtype.is_floating]
        if is_repeating:
            outputs = forward(*args, **kwargs)
            repeated_losses[:] = _take_losses(layer)
            return outputs
        if not places:
            return forward(*args, **kwargs)
        drawn: list[list[Tensor]] = []

        def run(*tensors: Tensor) -> Any:
            nonlocal is_repeating
            filled = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                filled[place] = tensor
            own_args, own_kwargs = keras.tree.pack_sequence_as((args, kwargs), filled)
            if not drawn:
                drawn.extend([] for _ in generators)
                drawn.append([])  # so that it is not empty: the forward pass was done
                with _recording(generators, drawn):
                    return forward(*own_args, **own_kwargs), _take_losses(layer)
            is_repeating = True
            try:
                # the layer itself is called: outside of the model, its types and phase are to be set again
                with _replaying(generators, drawn), _fixed(statistics):
                    outputs = layer(*own_args, **{"training": True, **own_kwargs})
                    return outputs, list(repeated_losses)
            finally:
                is_repeating = False

        losses = _take_losses(layer)  # of a call before, in a layer that is called several times
        # losses that the block adds are among its results: there is no gradient of what is inside it
        outputs, added = tf.recompute_grad(run)(*[leaves[i] for i in places])
        for loss in [*losses, *added]:
            layer.add_loss(loss)
        return outputs

    return call


def _take_losses(layer: Layer) -> list[Tensor]:
    """Return what a layer and those below added to the loss, and let them forget it."""
    losses = [loss for one in layer._flatten_layers() for loss in one._get_own_losses()]
    layer._clear_losses()
    return losses


def _generators(layer: Layer) -> Iterator[Any]:
    """Return the generators of seeds in a layer and below."""
    yield from (value for value in vars(layer).values() if isinstance(value, keras.random.SeedGenerator))
    for _, child in children(layer):
        yield from _generators(child)


@contextmanager
def _recording(generators: Sequence[Any], drawn: list[list[Tensor]]) -> Iterator[None]:
    """Return a context that notes the seeds that generators give."""

    def noting(generator: Any, seeds: list[Tensor]) -> Callable[..., Tensor]:
        draw = generator.next

        def next_seed(*args: Any, **kwargs: Any) -> Tensor:
            seeds.append(draw(*args, **kwargs))
            return seeds[-1]

        return next_seed

    with ExitStack() as stack:
        for generator, seeds in zip(generators, drawn, strict=False):
            stack.enter_context(_replaced(generator, "next", noting(generator, seeds)))
        yield


@contextmanager
def _replaying(generators: Sequence[Any], drawn: list[list[Tensor]]) -> Iterator[None]:
    """Return a context in which generators give the seeds that were noted."""

    def giving(seeds: list[Tensor]) -> Callable[..., Tensor]:
        left = iter(seeds)
        return lambda *_, **__: next(left)

    with ExitStack() as stack:
        for generator, seeds in zip(generators, drawn, strict=False):
            stack.enter_context(_replaced(generator, "next", giving(seeds)))
        yield


@contextmanager
def _fixed(variables: Sequence[Any]) -> Iterator[None]:
    """Return a context in which variables stay as they are: the forward pass moved the statistics already."""
    with ExitStack() as stack:
        for variable in variables:
            stack.enter_context(_replaced(variable, "assign", lambda value: value))
        yield


@contextmanager
def _replaced(thing: Any, method: str, other: Callable[..., Any]) -> Iterator[None]:
    """Return a context in which an object has another method; objects may stand in several."""
    own = vars(thing).get(method)
    vars(thing)[method] = other
    try:
        yield
    finally:
        if own is None:
            del vars(thing)[method]
        else:
            vars(thing)[method] = own


# what comes out is what went in
_ALIASES = frozenset(
    {
        *("Identity", "IdentityN", "Reshape", "ExpandDims", "Squeeze", "Bitcast", "EnsureShape"),
        *("StopGradient", "PreventGradient", "Snapshot"),
    }
)
# these take a tensor's shape alone, which a graph knows before it runs
_OF_SHAPES = frozenset({"Shape", "ShapeN", "Size", "Rank", "ZerosLike", "OnesLike"})
_READ = "ReadVariableOp"  # its output is the variable's own memory
# roughly, by jobs of six models: what a first step takes without tensors, and each operation of a micro-batch
_STEP_BYTES, _OPERATION_BYTES = 12 << 20, 30_000


@dataclass(frozen=True)
class Operation:
    """An operation that was done."""

    kind: str  # its type
    inputs: Sequence[int]  # numbers of the tensors that go in
    outputs: Sequence[tuple[int, int]]  # numbers and bytes of those that come out


class ActivationMeter:
    """Notes the operations that are done eagerly within its context.

    Args:
        is_cpu: whether tensors are in the host's memory, whose allocator keeps what it has had.
    """

    def __init__(self, is_cpu: bool) -> None:
        self._device = "CPU:0" if is_cpu else "GPU:0"
        self._operations: list[Operation] = []
        self._made: dict[int, tuple[str, int]] = {}  # by the number of a tensor, what it is, and bytes
        self._results: set[int] = set()
        self._of_graph: int | None = None
        self._taken: int | None = None  # None if the device's allocator does not count

    def __enter__(self) -> None:
        self._before = _counted(self._device, reset=True)
        op_callbacks.add_op_callback(self._note)

    def __exit__(self, *_: object) -> None:
        op_callbacks.remove_op_callback(self._note)
        after = _counted(self._device)
        if self._before is not None and after is not None:
            self._taken = max(0, after["peak"] - self._before["current"])

    def take_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Leave out the gradients of the variables, which are what the operations are for."""
        parts = tf.nest.flatten(list(gradients), expand_composites=True)
        self._results = {part._id for part in parts if hasattr(part, "_id")}

    def take_graph(self, gradients: Iterable[Tensor]) -> None:
        """Let the memory be what TensorFlow counts for graphs that run within the context."""
        self._of_graph = sum(map(_size, gradients))

    def found(self) -> StepMemory | None:
        """Return what the graph of these operations takes; None if they were done in a graph, or not done."""
        if self._of_graph is not None:
            if self._taken is None:
                return None
            activations = max(0, self._taken - self._of_graph)
            return StepMemory(activations, compiling=_STEP_BYTES, idle=self._taken)
        made = {number for operation in self._operations for number, _ in operation.outputs}
        if not self._results & made:
            return None
        return StepMemory(
            activations=most_bytes(self._operations, self._results),
            compiling=_STEP_BYTES + _OPERATION_BYTES * len(self._operations),
            idle=self._taken or 0,
            largest=self.largest(),
        )

    def largest(self) -> Sequence[tuple[str, int]]:
        """Return the largest tensors that were made, without the gradients of the parameters."""
        return largest_tensors(made for number, made in self._made.items() if number not in self._results)

    def _note(  # noqa: PLR0917 - as TensorFlow calls it
        self,
        kind: str | bytes,
        inputs: Any,
        attributes: Any,
        outputs: Any,
        op_name: Any = None,
        graph: Any = None,
    ) -> None:
        if graph is None:
            name = kind.decode() if isinstance(kind, bytes) else kind  # TensorFlow gives either
            taken = [tensor._id for tensor in inputs if hasattr(tensor, "_id")]
            if name in _OF_SHAPES:
                taken = []
            self._operations.append(Operation(name, taken, [(made._id, _size(made)) for made in outputs]))
            if name not in _ALIASES and name != _READ:
                for made in outputs:
                    text = f"{name} {tuple(made.shape)} {made.dtype.name}"
                    self._made[made._id] = text, _size(made)


def _counted(device: str, reset: bool = False) -> dict[str, int] | None:
    """Return the bytes that a device's tensors have, and the most that they have had since the last reset.

    None if its allocator does not count, as on a CPU with ``TF_ENABLE_ONEDNN_OPTS=0``.
    """
    try:
        if reset:
            tf.config.experimental.reset_memory_stats(device)
        found: dict[str, int] = tf.config.experimental.get_memory_info(device)
    except ValueError:
        return None
    return found


def most_bytes(operations: Sequence[Operation], results: set[int]) -> int:
    """Return the most that tensors take at once if each is freed after its last use, without the results."""
    needed, done = set(results), []
    for operation in reversed(operations):
        if any(number in needed for number, _ in operation.outputs):
            needed.update(operation.inputs)
            done.append(operation)
    done.reverse()
    block, sizes = _blocks(done)
    last = {
        block.get(number, number): place
        for place, operation in enumerate(done)
        for number in (*(number for number, _ in operation.outputs), *operation.inputs)
    }
    left_out = {block.get(number, number) for number in results}
    ends: dict[int, int] = {}
    for one, place in last.items():
        if one not in left_out:
            ends[place] = ends.get(place, 0) + sizes.get(one, 0)
    taken = most = 0
    for place, operation in enumerate(done):
        made = [number for number, _ in operation.outputs if block[number] == number]
        taken += sum(sizes[number] for number in made if number not in left_out)
        most = max(most, taken)
        taken -= ends.get(place, 0)
    return most


def _blocks(operations: Sequence[Operation]) -> tuple[dict[int, int], dict[int, int]]:
    """Return for each tensor the one that its memory was made for, and the bytes of these."""
    block: dict[int, int] = {}
    sizes: dict[int, int] = {}
    for operation in operations:
        aliases = operation.inputs if operation.kind in _ALIASES else ()
        for place, (number, size) in enumerate(operation.outputs):
            if place < len(aliases):
                block[number] = block.get(aliases[place], aliases[place])
            else:
                block[number], sizes[number] = number, 0 if operation.kind == _READ else size
    return block, sizes


def _size(tensor: Tensor) -> int:
    if tensor.dtype in (tf.resource, tf.variant, tf.string):
        return 0
    return int((tensor.shape.num_elements() or 0) * tensor.dtype.size)
