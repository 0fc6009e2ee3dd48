"""Looking into a model of Keras; ``torch.py`` does the same for PyTorch."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras.src.layers import layer as keras_layer

from hvdtrain.backends.tensorflow.functions import Phase, phase_of_layers
from hvdtrain.backends.tensorflow.objective.losses import NAMED
from hvdtrain.backends.tensorflow.probes import as_array
from hvdtrain.backends.tensorflow.state.model_state import ModelState, walk
from hvdtrain.data.order import mix
from hvdtrain.errors import TaskError
from hvdtrain.tools.parity.observation import MOMENTUM, Array, CallRecorder
from hvdtrain.tools.parity.plain import PlainLoop, Samples
from hvdtrain.workers.seeding import seed_host_step

# those of spatial dropout are kinds of Dropout
_DROPOUTS = (kl.Dropout, kl.AlphaDropout, kl.GaussianDropout)
_NORMS = (kl.BatchNormalization, kl.LayerNormalization, kl.GroupNormalization, kl.RMSNormalization)
# apply an activation to what their weights give
_ACTIVATING = (kl.Dense, kl.EinsumDense, kl.Conv1D, kl.Conv2D, kl.Conv3D)


def _settings(layer: Any) -> dict[str, float]:
    """Return what a layer was made with, under names that both frameworks share."""
    found = {"epsilon": float(layer.epsilon)} if isinstance(layer, _NORMS) else {}
    return found | ({MOMENTUM: float(layer.momentum)} if isinstance(layer, kl.BatchNormalization) else {})


def stop_dropout(model: Any) -> list[float]:
    """Let the dropout layers of a model drop nothing; return the rates that they had."""
    rates = []
    for layer in {id(one): one for one in model._flatten_layers()}.values():
        is_dropout = isinstance(layer, _DROPOUTS)
        for name in ("rate", "_dropout", "dropout", "recurrent_dropout"):
            value = vars(layer).get(name)
            if isinstance(value, int | float) and value and (is_dropout or name != "rate"):
                rates.append(float(value))
                setattr(layer, name, 0.0)
    return rates


class Recorder(CallRecorder):
    """Keeps the calls of a model's layers, within its context."""

    def __enter__(self) -> "Recorder":
        self._before: dict[int, Array | None] = {}
        self._stack = ExitStack()
        plain = keras_layer.Layer.__call__

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            if id(layer) not in self._paths or not tf.executing_eagerly():
                return plain(layer, *args, **kwargs)
            inputs = next(all_arrays((args, kwargs)), None)
            outputs = plain(layer, *args, **kwargs)
            before = self._before.pop(id(layer), None)
            self._keep(layer, inputs, all_arrays(outputs), _settings(layer), before)
            return outputs

        self._stack.enter_context(_replaced(keras_layer.Layer, "__call__", call))
        for layer in {id(one): one for one in self._model._flatten_layers()}.values():
            activation = getattr(layer, "activation", None)
            if isinstance(layer, _ACTIVATING) and activation not in (None, keras.activations.linear):
                noting = self._noting(id(layer), activation)
                self._stack.enter_context(_replaced(layer, "activation", noting))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _noting(self, key: int, activation: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """Return an activation that notes what it is given."""

        def noting(values: Any) -> Any:
            self._before[key] = next(all_arrays(values), None)
            return activation(values)

        return noting


@contextmanager
def _replaced(thing: Any, name: str, other: Any) -> Iterator[None]:
    """Return a context in which an object has another attribute; Keras does not see that it changes."""
    set_attribute = type.__setattr__ if isinstance(thing, type) else object.__setattr__
    before = getattr(thing, name)
    set_attribute(thing, name, other)
    try:
        yield
    finally:
        set_attribute(thing, name, before)


def all_arrays(value: Any) -> Iterator[Array]:
    """Yield copies of the tensors in a structure; those of a dictionary in the order of its keys."""
    for leaf in tf.nest.flatten(value):
        if tf.is_tensor(leaf) or isinstance(leaf, np.ndarray):
            yield np.array(as_array(tf.convert_to_tensor(leaf)))


@contextmanager
def in_fp64() -> Iterator[None]:
    """Return a context in which models are made that compute in fp64."""
    floats, policy = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    try:
        yield
    finally:
        keras.config.set_floatx(floats)
        keras.config.set_dtype_policy(policy)


def paths_of(model: Any) -> list[tuple[str, int]]:
    """Return the path and the identity of each layer."""
    return [("/".join(path), id(layer)) for path, layer in walk(model)]


class Loop(PlainLoop):
    """A loop of Keras, with a gradient tape."""

    framework, table, total = "tf", NAMED, tf.reduce_sum

    @property
    def state(self) -> ModelState:
        """The model's state."""
        return ModelState(self.model, self.renaming)

    def _open(self) -> None:
        if self.config.parameter_groups or not self.config.decay_norms_and_biases:
            raise TaskError("Keras's optimizers have no parameter_groups")
        self.model = self.backend.model
        for layer in self.model._flatten_layers():
            vars(layer).pop("call", None)  # that of synchronised batch norm, not Keras's own
        self._make_optimizer()

    def _make_optimizer(self) -> None:
        config = self.config
        self._variables = [one.variable for one in self.state.trainable_fields()]
        self._decay, self._is_adam = 0.0, False
        if hasattr(self.task, "tf_optimizer"):
            made = self.task.tf_optimizer()
        elif config.optimizer == "adamw":
            self._is_adam, betas = True, {"beta_1": config.adam_beta1, "beta_2": config.adam_beta2}
            made = keras.optimizers.AdamW(weight_decay=config.weight_decay, **betas)
        else:
            self._decay = config.weight_decay
            made = keras.optimizers.SGD(momentum=config.momentum)
        made.build(self._variables)
        self._of_base = float(made.learning_rate) / self.own_base if self.own_base else 1.0
        self.optimizer = made

    def step(self, samples: Samples, number: int, rate: float) -> float:
        """Take a step."""
        config = self.config
        seed_host_step(mix(config.seed, number, 0) >> 1)  # the draws of one worker
        self.optimizer.learning_rate = rate * self._of_base
        if self._is_adam:  # epsilon is added to the corrected root, as PyTorch's is
            self.optimizer.epsilon = config.adam_epsilon * (1 - config.adam_beta2 ** (number + 1)) ** 0.5
        variables, phase = self._variables, Phase(self.model, True)
        with tf.GradientTape() as tape:
            with phase_of_layers(True):
                loss = self._mean(*self._values(phase, self._tensors(samples), True))
            if (added := phase.added_loss()) is not None:
                loss += tf.cast(added, loss.dtype)
        # a tape takes the tf.Variables of Keras's
        gradients = tape.gradient(loss, [getattr(one, "value", one) for one in variables])
        found = [
            tf.zeros_like(v) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(gradients, variables, strict=True)
        ]
        if config.clip_norm is not None:
            found, _ = tf.clip_by_global_norm(found, config.clip_norm)
        if self.noise:
            noise = self.noise * max(float(tf.reduce_max(tf.abs(g))) for g in found)
            draw = np.random.default_rng(0)
            found = [g + tf.cast(noise * draw.standard_normal(g.shape), g.dtype) for g in found]
        decayed = [g + self._decay * tf.convert_to_tensor(v) for g, v in zip(found, variables, strict=True)]
        self.optimizer.apply(decayed, variables)
        return float(loss)

    def losses(self, samples: Samples, training: bool) -> tuple[Any, Any]:
        """Return the losses of samples, or their mean, and the weights of samples."""
        phase = Phase(self.model, training)
        with phase_of_layers(training):
            values, weights = self._values(phase, self._tensors(samples), training)
        added = phase.added_loss()
        values = tf.cast(values, tf.float64) + (0.0 if added is None else tf.cast(added, tf.float64))
        return values.numpy(), None if weights is None else np.asarray(weights)

    def seed(self, seed: int) -> None:
        """Seed the generators of TensorFlow and of the model's layers."""
        tf.random.set_seed(seed)
        for state in self.backend.parts.computation.seed_states:
            state.assign(tf.cast([seed, seed], state.dtype))

    def _like(self, weights: Any, values: Any) -> Any:
        return tf.cast(weights, values.dtype)

    def _tensors(self, samples: Samples) -> dict[str, Any]:
        return {name: tf.constant(array) for name, array in samples.items()}

    def _named(self, name: str, outputs: Any, targets: Any) -> Any:
        kinds: dict[str, tuple[Any, dict[str, Any]]] = {
            "mse": (keras.losses.MeanSquaredError, {}),
            "mae": (keras.losses.MeanAbsoluteError, {}),
            "binary_cross_entropy": (keras.losses.BinaryCrossentropy, {"from_logits": True}),
            "cross_entropy": (keras.losses.SparseCategoricalCrossentropy, {"from_logits": True}),
        }
        if name != "cross_entropy":
            targets = tf.reshape(tf.cast(targets, outputs.dtype), tf.shape(outputs))
            outputs, targets = (one if len(one.shape) > 1 else one[:, None] for one in (outputs, targets))
        mask = getattr(outputs, "_keras_mask", None)
        kind, options = kinds[name]
        losses = tf.reshape(kind(reduction=None, **options)(targets, outputs), (len(targets), -1))
        if mask is None:
            return tf.reduce_mean(losses, axis=1)
        counted = tf.reduce_sum(tf.reshape(tf.cast(mask, losses.dtype), (len(targets), -1)), axis=1)
        return tf.math.divide_no_nan(tf.reduce_sum(losses, axis=1), counted), counted
