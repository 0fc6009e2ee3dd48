"""Functional models of Keras divided into blocks at the places where few tensors lead on."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import keras
from keras.src.models.functional import Functional

from hvdtrain.backends.options import MARK
from hvdtrain.models.block import Block, called_in_order, parts_of

Tensor = Any
Key = tuple[Any, ...]


def divided(model: Functional) -> list[Any]:
    """Return the blocks between all places at which a functional model can be cut."""
    aliases: dict[Key, Key] = {}
    steps = list(_steps(model, (), aliases))

    def key(found: Key) -> Key:
        while found in aliases:
            found = aliases[found]
        return found

    given = [(id(tensor),) for tensor in model.inputs]
    results = [key((id(tensor),)) for tensor in model.outputs]
    last_use: dict[Key, int] = dict.fromkeys(results, len(steps))
    for place, step in enumerate(steps):
        for found in map(key, step.inputs):
            last_use[found] = max(last_use.get(found, 0), place)
    known, begin, entering = list(given), 0, list(given)
    blocks: list[Any] = []
    for place, step in enumerate(steps):
        known = [
            found
            for found in dict.fromkeys([*known, *map(key, step.outputs)])
            if last_use.get(found, -1) > place
        ]
        following = steps[place + 1].limit if place + 1 < len(steps) else 0
        is_end = place + 1 == len(steps)
        if is_end or len(known) <= max(step.limit, following):
            leaving = results if is_end else known
            part = steps[begin : place + 1]
            graph = _GraphBlock(
                part, entering, leaving, key, model if begin == 0 else None, model if is_end else None
            )
            layers = {id(s.operation): s.operation for s in part if isinstance(s.operation, keras.Layer)}
            blocks.append(Block(graph, *layers.values()))
            begin, entering = place + 1, list(known)
    return _without_idle(blocks)


class _Step(NamedTuple):
    """One operation of a functional model, nested models being taken apart."""

    operation: Any  # the layer or operation
    arguments: Any  # with which it is called, of symbolic tensors
    prefix: Key  # what stands before the keys of these tensors
    inputs: tuple[Key, ...]  # the keys of what it takes
    outputs: tuple[Key, ...]  # the keys of what it returns
    limit: int  # how many tensors may lead over a cut beside it: as many as its model takes


def _without_idle(blocks: list[Any]) -> list[Any]:
    """Join blocks without weights to the block before them, the first to the next, so that each has some."""
    joined: list[list[Any]] = []
    is_idle = True
    for block in blocks:
        has_weights = any(layer.weights for layer in parts_of(block, keras.Layer))
        if joined and (is_idle or not has_weights):
            joined[-1].append(block)
        else:
            joined.append([block])
        is_idle = is_idle and not has_weights
    return [_chained(chain) for chain in joined]


def _chained(chain: Sequence[Any]) -> Any:
    if len(chain) == 1:
        return chain[0]
    return Block(
        lambda *a, **k: called_in_order(chain, a, k),
        *(layer for block in chain for layer in parts_of(block, keras.Layer)),
    )


def _steps(model: Functional, prefix: Key, aliases: dict[Key, Key]) -> Iterator[_Step]:
    """Yield the operations of a model in an order in which they can be computed."""
    limit = max(1, len(model.inputs))
    for depth in sorted(model._nodes_by_depth, reverse=True):
        for node in model._nodes_by_depth[depth]:
            if not node.operation or node.is_input:
                continue
            inputs = tuple((*prefix, id(tensor)) for tensor in node.input_tensors)
            outputs = tuple((*prefix, id(tensor)) for tensor in node.outputs)
            inner = _nested(node)
            if inner is None:
                yield _Step(node.operation, node.arguments, prefix, inputs, outputs, limit)
                continue
            within = (*prefix, id(node))
            for outer, tensor in zip(inputs, inner.inputs, strict=True):
                own = (*within, id(tensor))
                yield _Step(_AsInput(tensor), None, prefix, (outer,), (own,), limit)
            yield from _steps(inner, within, aliases)
            for outer, tensor in zip(outputs, inner.outputs, strict=True):
                aliases[outer] = (*within, id(tensor))


def _nested(node: Any) -> Functional | None:
    """Return the model that a node calls, if it can be taken apart: if it is called with its inputs alone.

    A model that is marked as a block stays whole.
    """
    model = node.operation
    if getattr(model, MARK, False) is True:
        return None
    inner = getattr(model, "_functional", None) if isinstance(model, keras.Sequential) else model
    if not isinstance(inner, Functional) or type(model) not in (keras.Sequential, keras.Model, Functional):
        return None
    plain = all(value is None for value in keras.tree.flatten(node.arguments.kwargs))
    same = len(node.input_tensors) == len(inner.inputs) and len(node.arguments.args) == 1
    return inner if plain and same and len(node.outputs) == len(inner.outputs) else None


class _AsInput:
    """What a nested model does to what it is given: it has the type that its input says."""

    def __init__(self, tensor: Any) -> None:
        self._dtype = tensor.dtype

    def __call__(self, value: Tensor) -> Tensor:
        mask = keras.src.backend.get_keras_mask(value)
        found = keras.ops.convert_to_tensor(value, dtype=self._dtype)
        if mask is not None:
            keras.src.backend.set_keras_mask(found, mask)
        return found


class _GraphBlock:
    """Some operations of a functional model.

    Args:
        steps: the operations.
        entering: the keys of the tensors that it is given: one, or a list of several.
        leaving: those of the tensors that it returns, likewise.
        key: returns the key under which a tensor is computed.
        first: the model, if this is its first block, which is given what the model is.
        last: the model, if this is its last block, which returns what the model does.
    """

    def __init__(  # noqa: PLR0917 - made in one place
        self,
        steps: Sequence[_Step],
        entering: Sequence[Key],
        leaving: Sequence[Key],
        key: Callable[[Key], Key],
        first: Functional | None,
        last: Functional | None,
    ) -> None:
        self._steps = list(steps)
        self._entering, self._leaving = list(entering), list(leaving)
        self._key = key
        self._first, self._last = first, last

    def __call__(self, value: Any) -> Any:
        if self._first is not None:
            given = self._first._standardize_inputs(value)
        else:
            given = [value] if len(self._entering) == 1 else list(value)
        values = dict(zip(self._entering, given, strict=True))
        for step in self._steps:
            if step.arguments is None:
                outputs = step.operation(values[self._key(step.inputs[0])])
            else:
                own = {found[-1]: values[self._key(found)] for found in step.inputs}
                arguments, named = step.arguments.fill_in(own)
                # a default of False, such as Dropout's, stands there as if it had been given
                if "training" in getattr(step.operation, "_call_context_args", ()):
                    named = {name: value for name, value in named.items() if name != "training"}
                outputs = step.operation(*arguments, **named)
            for found, output in zip(step.outputs, keras.tree.flatten(outputs), strict=True):
                values[found] = output
        results = [values[found] for found in self._leaving]
        if self._last is None:
            return results[0] if len(results) == 1 else results
        packed = keras.tree.pack_sequence_as(self._last._outputs_struct, results)
        return packed[0] if isinstance(packed, list | tuple) and len(packed) == 1 else packed
