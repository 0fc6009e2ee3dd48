"""The model that a task makes, changed as the config asks."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import keras

from hvdtrain.backends.tensorflow.activation_checkpointing import apply_activation_checkpointing
from hvdtrain.backends.tensorflow.precision import autocast
from hvdtrain.backends.tensorflow.sync_batch_norm import BatchNormSync
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, TaskError

LOSS = "loss"  # the name in the model of a loss that has variables


def make_model(task: Any, config: Config, batch_norm: BatchNormSync | None = None) -> keras.Model:
    """Return the task's model, changed as the config asks.

    Args:
        task: the task.
        config: the config.
        batch_norm: synchronises batch norm if the config or a layer asks for it; None if it is not to.

    Raises:
        TaskError: If the task gives something else, or a model without weights.
    """
    with autocast(config.precision):
        model = task.tf_model()
    if not isinstance(model, keras.Model):
        raise TaskError(f"tf_model() must give a keras.Model, found {type(model).__name__}")
    if not model.built:
        raise TaskError(
            "tf_model() gave a model without weights yet", "Call it on sample inputs once, or build() it."
        )
    if batch_norm is not None:
        batch_norm.take_over(model, every=config.sync_batch_norm)
    if batch_norm is not None and batch_norm.layers and (config.compile or config.sync_every):
        raise ConfigError(
            "the model has BatchNormalization(synchronized=True), which goes neither with compile nor with "
            "sync_every",
            "Leave out the option, or synchronized=True.",
            everywhere=True,
        )
    if config.checkpoint_activations:
        apply_activation_checkpointing(model)
    loss = getattr(task, "tf_loss", None) or getattr(task, "loss", None)
    if isinstance(loss, keras.losses.Loss | keras.layers.Layer):
        _add_loss(model, loss)
    return model


def _add_loss(model: keras.Model, loss: Any) -> None:
    """Make a loss that has variables a part of the model, so that it is trained, saved and sent with it.

    Raises:
        TaskError: If the model has a layer of this name.
    """
    part = loss
    if not isinstance(part, keras.layers.Layer):
        part = keras.layers.Layer(dtype="float32")
        for name, value in vars(loss).items():
            if isinstance(value, keras.Variable | keras.layers.Layer | list | tuple | dict):
                setattr(part, name, value)
    own = {id(variable) for variable in model.variables}
    if all(id(variable) in own for variable in part.variables):
        return
    if any(layer.name == LOSS for layer in model._layers):
        raise TaskError(
            f"the task's loss has variables, which become the model's part {LOSS!r}, a name that it has",
            "Name the model's layer differently.",
        )
    part.name, part._hvdtrain_is_loss = LOSS, True
    list.append(model._layers, part)  # past Keras, which takes no more parts of a model that is built


def take_loss(model: keras.Model) -> list[Any]:
    """Take a loss that has variables out of a model, which is then as the task made it; return it."""
    parts = [layer for layer in model._layers if hasattr(layer, "_hvdtrain_is_loss")]
    for part in parts:
        list.remove(model._layers, part)
    return parts


@contextmanager
def without_loss(model: keras.Model) -> Iterator[None]:
    """Return a context in which a model is as the task made it, without a loss that has variables."""
    parts = take_loss(model)
    try:
        yield
    finally:
        list.extend(model._layers, parts)
