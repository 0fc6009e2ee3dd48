"""What a dry run needs in Keras; ``torch/dry_run.py`` does the same for PyTorch."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
from tensorflow.python.eager import context as eager

from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.objective.losses import is_masked
from hvdtrain.workers.seeding import host_generators

Layer = Any


class Recorder:
    """A model that keeps what its last call returned; in everything else the model itself.

    Args:
        model: the model.

    Attributes:
        outputs: what the call returned, with arrays in place of tensors; calls in a graph are left out.
        is_masked: whether it had a Keras mask.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.outputs: Any = None
        self.is_masked = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model and keep what it returns."""
        outputs = self.model(*args, **kwargs)
        self.is_masked = is_masked(outputs)
        if tf.executing_eagerly():
            self.outputs = tf.nest.map_structure(as_array, outputs)
        return outputs

    def __getattr__(self, name: str) -> Any:
        return getattr(self.model, name)


def as_array(value: Any) -> Any:
    """Return a tensor as an array, of half precision as fp32; another value as it is."""
    if not tf.is_tensor(value):
        return value
    return (tf.cast(value, tf.float32) if value.dtype in (tf.bfloat16, tf.float16) else value).numpy()


@contextmanager
def state_kept(model: Layer, others: Sequence[Any] = ()) -> Iterator[None]:
    """Return a context after which a model and the random generators of both libraries are as they were.

    The copies lie in the host's memory. Those of variables that lie there take none until these change.

    Args:
        model: the model.
        others: more variables that are to be as they were.
    """
    with tf.device("CPU"):
        before = [(variable, tf.identity(native(variable))) for variable in (*model.variables, *others)]
    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    seeds = None if generator is None else generator.state.numpy()
    operations = eager.context()._rng.getstate()  # what random operations outside of a graph draw from
    try:
        yield
    finally:
        for variable, value in before:
            variable.assign(value)
        global_state.set_global_attribute(GLOBAL_SEED_GENERATOR, generator)
        if generator is not None:
            generator.state.assign(seeds)
        if eager.context()._rng.getstate() != operations:
            eager.context()._rng.setstate(operations)
            eager.context().clear_kernel_cache()  # random operations keep generators of their own there


def seed_operations(step: int) -> None:
    """Let random operations outside of a graph draw what belongs to a step; ``state_kept`` undoes it."""
    eager.context()._rng.seed(step)
    eager.context().clear_kernel_cache()


@contextmanager
def draws_noted(notes: list[str]) -> Iterator[None]:
    """Return a context that notes which generators are drawn from that a step cannot seed.

    Args:
        notes: what is found, for the user.
    """
    remedy = "use keras.random with seed=keras.random.SeedGenerator(...), an attribute of the model"
    host, operations = host_generators(), eager.context()._rng.getstate()
    yield
    if repr(host_generators()) != repr(host):
        notes.append(
            "model or loss draw from the generator of numpy or Python: a step is traced once, so but for "
            f"tf.numpy_function all steps have the same numbers; {remedy}"
        )
    if eager.context()._rng.getstate() != operations:
        notes.append(
            "model or loss draw from tf.random: a resumed run draws other numbers than the whole one; "
            f"{remedy}"
        )


def last_activation(model: Layer) -> str:
    """Return "softmax" or "sigmoid" if the model's last layer computes it; else nothing."""
    layers = getattr(model, "layers", [])
    last = layers[-1] if layers else None
    if isinstance(last, keras.Model):
        return last_activation(last)
    if isinstance(last, keras.layers.Softmax):
        return "softmax"
    name = getattr(getattr(last, "activation", None), "__name__", "")
    return name if name in {"softmax", "sigmoid"} else ""


def count_frozen(model: Layer) -> int:
    """Return the number of parameters that training does not change; moving statistics are none."""
    layers = {id(layer): layer for layer in model._flatten_layers()}.values()
    parameters = {id(v): v for layer in layers for v in layer._trainable_variables}
    trained = {id(v) for v in model.trainable_variables}
    return sum(math.prod(v.shape) for key, v in parameters.items() if key not in trained)
