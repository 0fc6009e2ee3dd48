"""Batch norm over the global batch, in Keras; ``torch/sync_batch_norm.py`` does the same for PyTorch."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from hvdtrain.backends.tensorflow.batches import Sized
from hvdtrain.backends.tensorflow.state.model_state import walk
from hvdtrain.backends.workers import group_of
from hvdtrain.errors import TaskError

Tensor = Any
Layer = Any

MARK = "synchronises"  # the attribute of a layer's class whose call may be replaced in training


def find_batch_norms(model: Layer) -> dict[str, Layer]:
    """Return the batch-norm layers of a model by their path."""
    kind = keras.layers.BatchNormalization
    found = {id(layer): (".".join(path), layer) for path, layer in walk(model) if isinstance(layer, kind)}
    return dict(found.values())


class BatchNormSync:
    """What the synchronised layers of a model share."""

    def __init__(self, workers: Sized) -> None:
        self.weights: Tensor | None = None  # (samples,), set before each micro-batch while a step is traced
        self.layers = 0  # how many it has taken over
        self._workers = workers
        self._group = group_of(workers)

    def take_over(self, model: Layer, every: bool = True) -> None:
        """Make a model's batch-norm layers normalise over all workers; their state stays as it is."""
        for path, layer in find_batch_norms(model).items():
            kind = type(layer)
            if not (every or (getattr(layer, "synchronized", False) and self._workers.may_reduce)):
                continue
            plain = kind.call is keras.layers.BatchNormalization.call and not getattr(layer, "renorm", False)
            if not (plain or getattr(kind, MARK, False)):
                raise TaskError(
                    f"{'--sync-batch-norm' if every else 'synchronized=True'} cannot synchronise {path}: "
                    f"{kind.__name__} computes in its own way",
                    "Give the model Keras's own layer, without renorm; or, where that is as good in "
                    f"training, give {kind.__name__} the attribute {MARK} = True.",
                )
            # not a class of its own: a saved model names its layers' classes
            name = "hvdtrain.batch_norm." + re.sub(r"[^\w.]", "_", path)
            layer.call = partial(_call, layer, layer.call, self, name)
            self.layers += 1

    def sum(self, vector: Tensor, name: str) -> Tensor:
        """Collective. Sum a tensor over workers."""
        if not self._workers.may_reduce:
            return vector
        return hvd.allreduce(vector, op=hvd.Sum, name=name, **self._group)

    def weights_of(self, x: Tensor) -> Tensor:
        """Return the weights of a tensor's rows, (rows,), fp64: those of their samples, or all alike."""
        assert self.weights is not None  # set before the model is called
        weights = tf.cast(self.weights, tf.float64)
        rows, samples, alike = x.shape[0], weights.shape[0], tf.ones(tf.shape(x)[:1], tf.float64)
        if samples is None:  # not known when the step is traced
            rows, samples = tf.shape(x)[0], tf.shape(weights)[0]
            is_whole = tf.equal(rows % samples, 0)
            return tf.cond(is_whole, lambda: tf.repeat(weights, rows // samples), lambda: alike)
        return alike if rows is None or rows % samples else tf.repeat(weights, rows // samples)


def _call(  # noqa: PLR0917 - the layer's arguments, as Keras calls it, after those that are bound
    layer: Layer,
    plain_call: Any,
    sync: BatchNormSync,
    name: str,
    inputs: Tensor,
    training: bool | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Normalise; in evaluation as the plain layer does."""
    if not (training and layer.trainable):
        return plain_call(inputs, training=training, mask=mask)
    x = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
    weights = sync.weights_of(x)
    if mask is not None:
        weights = tf.reshape(weights, (-1, *[1] * (len(mask.shape) - 1))) * tf.cast(mask, tf.float64)
    axis = layer.axis % len(x.shape)
    mean, variance, count = moments(tf.stop_gradient(x), weights, axis, sync, f"{name}.forward")
    _track(layer, mean, variance, count)
    shape = *tf.unstack(tf.shape(weights)), *[1] * (len(x.shape) - len(weights.shape))
    shares = tf.reshape(weights / tf.maximum(count, 1), shape)
    gamma = keras.ops.cast(layer.gamma, x.dtype) if layer.scale else tf.ones(mean.shape, x.dtype)
    beta = keras.ops.cast(layer.beta, x.dtype) if layer.center else tf.zeros(mean.shape, x.dtype)
    summed = partial(sync.sum, name=f"{name}.backward")
    normalise = _normaliser(mean, variance + layer.epsilon, shares, axis, summed)
    return tf.cast(normalise(x, gamma, beta), layer.compute_dtype)


def _track(layer: Layer, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    """Move the moving statistics, by the biased variance, unless there was no sample at all."""
    rate = (1 - layer.momentum) * tf.cast(count > 0, tf.float64)
    for moving, new in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
        before = tf.cast(moving.value, tf.float64)
        moving.assign(tf.cast(before + rate * (new - before), moving.dtype))


def moments(x: Tensor, weights: Tensor, axis: int, sync: BatchNormSync, name: str) -> tuple[Tensor, ...]:
    """Collective. Return mean and biased variance per channel over all workers; see ``torch/``."""
    leading = list(range(len(weights.shape)))
    inner = [i for i in range(len(x.shape)) if i != axis and i not in leading]
    places = tf.cast(tf.size(x) / tf.size(weights) / x.shape[axis], tf.float64)
    means = tf.reduce_mean(x, inner, keepdims=True)
    deviations = tf.reduce_sum(tf.math.squared_difference(x, means), inner) if inner else 0.0
    means = tf.cast(tf.squeeze(means, inner), tf.float64)
    squares = tf.cast(deviations, tf.float64) + tf.square(means) * places
    first, second = (tf.tensordot(weights, value, [leading, leading]) for value in (means * places, squares))
    sums = sync.sum(tf.concat([first, second, [tf.reduce_sum(weights) * places]], 0), name)
    count, channels = sums[-1], x.shape[axis]
    mean, square = sums[:channels] / tf.maximum(count, 1), sums[channels:-1] / tf.maximum(count, 1)
    return mean, tf.maximum(square - tf.square(mean), 0), count


def _normaliser(mean: Tensor, variance: Tensor, shares: Tensor, axis: int, summed: Any) -> Any:
    """Return what normalises, with gradient through mean and variance, too; see ``torch/``."""

    def normalise(x: Tensor, gamma: Tensor, beta: Tensor) -> tuple[Tensor, Callable[..., Any]]:
        shape = [1] * len(x.shape)
        shape[axis] = -1
        others = [i for i in range(len(x.shape)) if i != axis]

        def spread(vector: Tensor) -> Tensor:
            return tf.reshape(tf.cast(vector, x.dtype), shape)

        rescale = tf.math.rsqrt(variance)
        scale = rescale * tf.cast(gamma, tf.float64)

        def gradient(dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            dbeta = tf.reduce_sum(dy, others)
            dgamma = tf.reduce_sum(dy * (x - spread(mean)), others) * tf.cast(rescale, x.dtype)
            sums = summed(tf.cast(tf.stack([dbeta, dgamma]), tf.float64))
            slope = scale * rescale * sums[1]
            offset = scale * sums[0] - slope * mean
            through = tf.cast(shares, x.dtype) * (spread(offset) + spread(slope) * x)
            return spread(scale) * dy - through, dgamma, dbeta

        return x * spread(scale) + spread(tf.cast(beta, tf.float64) - mean * scale), gradient

    return tf.custom_gradient(normalise)
