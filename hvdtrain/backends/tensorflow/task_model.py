"""The model that a task makes, changed as the config asks."""

from typing import Any

import keras

from hvdtrain.backends.tensorflow.activation_checkpointing import apply_activation_checkpointing
from hvdtrain.backends.tensorflow.precision import autocast
from hvdtrain.backends.tensorflow.sync_batch_norm import BatchNormSync
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, TaskError


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
    return model
