"""Blocks of a Keras model that are computed again; ``torch/activations.py`` does the same for PyTorch."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import repeat
from typing import Any

import keras
import tensorflow as tf

from hvdtrain.backends.options import find_blocks
from hvdtrain.backends.tensorflow.state.layouts import children

Layer = Any
Tensor = Any


def apply_activation_checkpointing(model: Layer) -> None:
    """Let a model keep what goes into its blocks, and compute the rest again where it is needed."""
    remedy = "tf_model()", "keras.layers.Layer", "or use two or more of it in one place"
    for layer in find_blocks(model, children, _is_repeatable, remedy):
        layer.call = _recomputed(layer)


def _is_repeatable(_: Layer, child: Layer) -> bool:
    """Return whether a layer has weights, of a class that is not Keras's own."""
    return bool(child.weights) and not type(child).__module__.startswith("keras.")


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
                with _replaced("next", generators, map(_noting, generators, drawn)):
                    return forward(*own_args, **own_kwargs), _take_losses(layer)
            is_repeating = True
            try:
                # the layer itself is called: outside of the model, its types and phase are to be set again
                # statistics stay as they are: the forward pass has moved them
                fixed = _replaced("assign", statistics, repeat(lambda value: value))
                with _replaced("next", generators, map(_giving, drawn)), fixed:
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


def _noting(generator: Any, seeds: list[Tensor]) -> Callable[..., Tensor]:
    """Return what draws a generator's next seed, and notes it."""
    draw = generator.next

    def next_seed(*args: Any, **kwargs: Any) -> Tensor:
        seeds.append(draw(*args, **kwargs))
        return seeds[-1]

    return next_seed


def _giving(seeds: list[Tensor]) -> Callable[..., Tensor]:
    """Return what gives the seeds that were noted, one after the other."""
    left = iter(seeds)
    return lambda *_, **__: next(left)


@contextmanager
def _replaced(method: str, things: Sequence[Any], others: Iterable[Callable[..., Any]]) -> Iterator[None]:
    """Return a context in which objects have other methods; contexts may lie in one another."""
    before = [vars(thing).get(method) for thing in things]
    for thing, other in zip(things, others, strict=False):
        vars(thing)[method] = other
    try:
        yield
    finally:
        for thing, own in zip(things, before, strict=True):
            vars(thing).pop(method, None)  # one may stand among them twice
            if own is not None:
                vars(thing)[method] = own
