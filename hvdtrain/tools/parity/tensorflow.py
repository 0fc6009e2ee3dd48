"""Looking into a model of Keras; ``torch.py`` does the same for PyTorch."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import layers as kl
from keras.src.layers import layer as keras_layer
from numpy.typing import NDArray

from hvdtrain.backends.custom_step import Optimizers
from hvdtrain.backends.objective.model_call import nested_batch
from hvdtrain.backends.tensorflow.functions import Phase, phase_of_layers
from hvdtrain.backends.tensorflow.objective.losses import NAMED
from hvdtrain.backends.tensorflow.probes import as_array
from hvdtrain.backends.tensorflow.state.model_state import ModelState, walk
from hvdtrain.data.order import mix
from hvdtrain.errors import TaskError
from hvdtrain.tools.parity.findings import CLASS
from hvdtrain.tools.parity.observation import CallRecorder, LayerCall
from hvdtrain.tools.parity.plain import PlainLoop, Samples, StepOptimizer, weighted_mean
from hvdtrain.workers.seeding import seed_host_step

_CONVOLUTIONS = (kl.Conv1D, kl.Conv2D, kl.Conv3D)
# those of spatial dropout are kinds of Dropout
_DROPOUTS = (kl.Dropout, kl.AlphaDropout, kl.GaussianDropout)
_NORMS = (kl.BatchNormalization, kl.LayerNormalization, kl.GroupNormalization, kl.RMSNormalization)


def settings_of(layer: Any, shape: tuple[int, ...]) -> dict[str, Any]:
    """Return what a layer was made with.

    Args:
        layer: the layer.
        shape: the shape of its input; empty if that is no tensor.
    """
    found: dict[str, Any] = {}
    if isinstance(layer, _NORMS):
        found["epsilon"] = float(layer.epsilon)
    if isinstance(layer, kl.BatchNormalization):
        found["kept statistics"] = round(float(layer.momentum), 12)
    if isinstance(layer, kl.GroupNormalization):
        found["groups"] = layer.groups
    if isinstance(layer, (kl.Dense, *_CONVOLUTIONS)):
        found["bias"] = bool(layer.use_bias)
    if isinstance(layer, _CONVOLUTIONS):
        found |= {"strides": list(layer.strides), "dilation": list(layer.dilation_rate)}
        found["groups"] = layer.groups
        if len(shape) == len(layer.kernel_size) + 2:
            found["padding"] = _padding(layer, shape)
    activation = getattr(layer, "activation", None)
    if isinstance(layer, kl.Activation) and activation is keras.activations.gelu:
        found["gelu"] = "erf"
    if isinstance(layer, kl.LeakyReLU):
        found["negative slope"] = float(layer.negative_slope)
    if isinstance(layer, _DROPOUTS):
        found["rate"] = float(layer.rate)
    if isinstance(layer, kl.MultiHeadAttention):
        found["heads"] = layer.num_heads
    return found


def is_channels_first(layer: Any) -> bool:
    """Return whether a layer takes and gives arrays whose second axis is that of channels."""
    return getattr(layer, "data_format", None) == "channels_first"


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


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Return what an optimizer was made with."""
    found: dict[str, Any] = {CLASS: type(optimizer).__name__}
    for name in ("momentum", "epsilon", "nesterov"):
        if hasattr(optimizer, name):
            found[name] = getattr(optimizer, name)
    if hasattr(optimizer, "beta_1"):
        found["betas"] = [float(optimizer.beta_1), float(optimizer.beta_2)]
    if not type(optimizer).__module__.startswith("hvdtrain."):  # the trainer's own have another field
        found["weight decay"] = float(optimizer.weight_decay or 0.0)
    if constraints := {type(v.constraint).__name__ for v in optimizer._trainable_variables if v.constraint}:
        found["constraints"] = ", ".join(sorted(constraints))
    return found


def _padding(layer: Any, shape: tuple[int, ...]) -> list[list[int]]:
    """Return what a convolution adds before and after each spatial axis of inputs of a shape.

    With "same", the output has the size of the input / the stride, and what is odd is added behind.
    """
    sizes = shape[2:] if is_channels_first(layer) else shape[1:-1]
    found = []
    for size, kernel, stride, dilation in zip(
        sizes, layer.kernel_size, layer.strides, layer.dilation_rate, strict=True
    ):
        reach = dilation * (kernel - 1) + 1
        if layer.padding == "same":
            total = max((-(-size // stride) - 1) * stride + reach - size, 0)
            found.append([total // 2, total - total // 2])
        else:
            found.append([reach - 1, 0] if layer.padding == "causal" else [0, 0])
    return found


# layers that apply an activation to what their weights give
_ACTIVATING = (keras.layers.Dense, keras.layers.EinsumDense, keras.layers.Conv1D, keras.layers.Conv2D,
               keras.layers.Conv3D)  # fmt: skip


class Recorder(CallRecorder):
    """Keeps the calls of a model's layers, within its context."""

    def __init__(self, model: Any, paths: Mapping[int, str]) -> None:
        super().__init__(model, paths)
        self._before: dict[int, NDArray[Any] | None] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "Recorder":
        plain = keras_layer.Layer.__call__
        recorder = self

        def call(layer: Any, *args: Any, **kwargs: Any) -> Any:
            return recorder._record(plain, layer, args, kwargs)

        self._stack.enter_context(_replaced(keras_layer.Layer, "__call__", call))
        for layer in {id(one): one for one in self._model._flatten_layers()}.values():
            activation = getattr(layer, "activation", None)
            if isinstance(layer, _ACTIVATING) and activation not in (None, keras.activations.linear):
                self._stack.enter_context(_noting(layer, activation, self._before))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _record(self, plain: Callable[..., Any], layer: Any, args: Any, kwargs: Any) -> Any:
        if id(layer) not in self._paths or not tf.executing_eagerly():
            return plain(layer, *args, **kwargs)
        inputs = first_array((args, kwargs))
        outputs = plain(layer, *args, **kwargs)
        if layer is self._model and not self.outputs:
            self.outputs = tuple(all_arrays(outputs))
        self.calls.append(
            LayerCall(
                self._paths[id(layer)],
                type(layer).__name__,
                settings_of(layer, () if inputs is None else inputs.shape),
                inputs,
                first_array(outputs),
                self._before.pop(id(layer), None),
                channels_first=is_channels_first(layer),
            )
        )
        return outputs


@contextmanager
def _noting(layer: Any, activation: Callable[[Any], Any], found: dict[int, Any]) -> Iterator[None]:
    """Return a context that notes what a layer gives to its activation."""

    def noting(values: Any) -> Any:
        found[id(layer)] = first_array(values)
        return activation(values)

    with _replaced(layer, "activation", noting):
        yield


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


def first_array(value: Any) -> NDArray[Any] | None:
    """Return a copy of the first tensor in a structure; None if there is none."""
    return next(all_arrays(value), None)


def all_arrays(value: Any) -> Iterator[NDArray[Any]]:
    """Yield copies of the tensors in a structure; those of a dictionary in the order of its keys."""
    for leaf in tf.nest.flatten(value):
        if tf.is_tensor(leaf) or isinstance(leaf, np.ndarray):
            yield to_array(leaf)


def to_array(tensor: Any) -> NDArray[Any]:
    """Return a copy of a tensor as an array; of half precision as fp32."""
    return np.array(as_array(tf.convert_to_tensor(tensor)))


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

    framework = "tf"

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
        self._make_optimizers()

    def _make_optimizers(self) -> None:
        config = self.config
        trained = [one.variable for one in self.state.trainable_fields()]
        self._decay = 0.0
        if hasattr(self.task, "tf_optimizers"):
            given = self.task.tf_optimizers(self.model)
            pairs = {name: one if isinstance(one, tuple) else (one, trained) for name, one in given.items()}
        elif hasattr(self.task, "tf_optimizer"):
            pairs = {"optimizer": (self.task.tf_optimizer(), trained)}
        elif config.optimizer == "adamw":
            betas = {"beta_1": config.adam_beta1, "beta_2": config.adam_beta2}
            adam = keras.optimizers.AdamW(weight_decay=config.weight_decay, **betas)
            pairs = {"optimizer": (adam, trained)}
        else:
            self._decay = config.weight_decay
            pairs = {"optimizer": (keras.optimizers.SGD(momentum=config.momentum), trained)}
        self._optimizers: dict[str, tuple[Any, Any]] = {}
        for name, (optimizer, variables) in pairs.items():
            optimizer.build(variables)
            scale = float(optimizer.learning_rate) / self.own_base if self.own_base else 1.0
            self._optimizers[name] = (optimizer, variables)
            optimizer._of_base = scale

    def step(self, samples: Samples, number: int, rate: float) -> float:
        """Take a step with a batch; return its loss."""
        seed_host_step(mix(self.config.seed, number, 0) >> 1)  # the draws of one worker
        for optimizer, _ in self._optimizers.values():
            optimizer.learning_rate = rate * optimizer._of_base
            if not hasattr(self.task, "tf_optimizer") and self.config.optimizer == "adamw":
                # epsilon is added to the corrected root, as PyTorch's is
                optimizer.epsilon = (
                    self.config.adam_epsilon * (1 - self.config.adam_beta2 ** (number + 1)) ** 0.5
                )
        batch = self._tensors(samples)
        if self._step is not None:
            given = {name: self._given(*pair) for name, pair in self._optimizers.items()}
            optimizers = Optimizers(given)
            optimizers.step = number
            with phase_of_layers(True):
                losses = self._step(Phase(self.model, True), nested_batch(batch), optimizers)[0]
            values, weights = self._pair(losses)
            return float(weighted_mean(values, weights, tf.reduce_sum))
        ((optimizer, variables),) = self._optimizers.values()
        with tf.GradientTape() as tape:
            loss = self._mean(batch, True)
        found = tape.gradient(loss, [getattr(one, "value", one) for one in variables])
        self._apply(optimizer, variables, found)
        return float(loss)

    def _mean(self, batch: Mapping[str, Any], training: bool) -> Any:
        phase = Phase(self.model, training)
        with phase_of_layers(training):
            loss = weighted_mean(*self._values(phase, batch, training), tf.reduce_sum)
        added = phase.added_loss()
        return loss if added is None else loss + tf.cast(added, loss.dtype)

    def _apply(self, optimizer: Any, variables: Any, found: Any) -> None:
        dense = [
            tf.zeros_like(v) if g is None else tf.convert_to_tensor(g)
            for g, v in zip(found, variables, strict=True)
        ]
        if self.config.clip_norm is not None:
            dense, _ = tf.clip_by_global_norm(dense, self.config.clip_norm)
        if self.noise:
            largest = max(float(tf.reduce_max(tf.abs(g))) for g in dense)
            draw = np.random.default_rng(0)
            dense = [
                g + tf.cast(self.noise * largest * draw.standard_normal(g.shape), g.dtype) for g in dense
            ]
        decayed = [g + self._decay * tf.convert_to_tensor(v) for g, v in zip(dense, variables, strict=True)]
        optimizer.apply(decayed, variables)

    def settings(self) -> dict[str, Any]:
        """Return what the optimizer was made with."""
        found: dict[str, Any] = optimizer_settings(next(iter(self._optimizers.values()))[0])
        return found | {"weight decay": self._decay or found.get("weight decay", 0.0)}

    def _given(self, optimizer: Any, variables: Any) -> Any:
        def gradients(losses: Any, tape: Any) -> Any:
            values, weights = self._pair(losses)
            share = tf.ones_like(values) if weights is None else weights
            share = share / tf.reduce_sum(share) if values.shape.rank else share
            found = tape.gradient(values, [one.value for one in variables], share)
            return [
                tf.zeros_like(v) if g is None else tf.convert_to_tensor(g)
                for g, v in zip(found, variables, strict=True)
            ]

        return StepOptimizer(gradients, lambda found: self._apply(optimizer, variables, found), variables)

    def losses(self, samples: Samples, training: bool) -> tuple[Any, Any]:
        """Return the losses of samples, or their mean, and the weights of samples."""
        phase = Phase(self.model, training)
        with phase_of_layers(training):
            values, weights = self._values(phase, self._tensors(samples), training)
        added = phase.added_loss()
        values = tf.cast(values, tf.float64) + (0.0 if added is None else tf.cast(added, tf.float64))
        return values.numpy(), None if weights is None else np.asarray(weights)

    def seed(self, generator: str, seed: int) -> None:
        """Seed the generators of TensorFlow and of the model's layers."""
        tf.random.set_seed(seed)
        for state in self.backend.parts.computation.seed_states:
            state.assign(tf.cast([seed, seed], state.dtype))

    def _like(self, weights: Any, values: Any) -> Any:
        return tf.cast(weights, values.dtype)

    def _tensors(self, samples: Samples) -> dict[str, Any]:
        return {name: tf.constant(array) for name, array in samples.items()}

    def _table(self) -> Mapping[str, Any]:
        return NAMED

    def _named(self, name: str, outputs: Any, targets: Any) -> Any:
        kinds: dict[str, Any] = {
            "mse": keras.losses.MeanSquaredError,
            "mae": keras.losses.MeanAbsoluteError,
            "binary_cross_entropy": lambda reduction: keras.losses.BinaryCrossentropy(
                True, reduction=reduction
            ),
            "cross_entropy": lambda reduction: keras.losses.SparseCategoricalCrossentropy(
                True, reduction=reduction
            ),
        }
        if name != "cross_entropy":
            targets = tf.reshape(tf.cast(targets, outputs.dtype), tf.shape(outputs))
            outputs, targets = (one if len(one.shape) > 1 else one[:, None] for one in (outputs, targets))
        mask = getattr(outputs, "_keras_mask", None)
        losses = kinds[name](reduction=None)(targets, outputs)
        if mask is not None:
            return tf.reduce_sum(losses) / tf.reduce_sum(tf.cast(mask, losses.dtype))
        return tf.reduce_mean(tf.reshape(losses, (len(targets), -1)), axis=1)
