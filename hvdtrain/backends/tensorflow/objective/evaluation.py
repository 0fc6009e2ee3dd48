"""Metrics of a whole evaluation in TensorFlow; as in ``torch/objective/evaluation.py``."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.backends.objective.logits import check_comparable
from hvdtrain.backends.objective.metric_states import Collectives
from hvdtrain.backends.objective.named_metrics import MetricFunctions, Setting, check_flat, check_targets
from hvdtrain.backends.tensorflow.objective.losses import classes_last, cross_entropy, mask_of, shaped_like
from hvdtrain.backends.tensorflow.objective.metric_objects import object_states
from hvdtrain.backends.tensorflow.program import to_numpy


class HorovodCollectives(Collectives):
    """How objects, as bytes, and the states of metrics move between workers."""

    hvd = hvd
    to_tensor = staticmethod(tf.constant)
    on_host = staticmethod(partial(tf.device, "CPU"))

    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for: steps wait for theirs."""
        return False


Tensor = Any
Batch = Mapping[str, Tensor]


def as_array(tensor: Tensor) -> NDArray[np.generic]:
    """Return what an update gave as an array: a tensor on any device, or what numpy takes."""
    is_tensor = tf.is_tensor(tensor) or keras.ops.is_tensor(tensor)
    return to_numpy(tensor) if is_tensor else np.asarray(tensor)


def counts(outputs: Tensor, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Return, of each sample, how often each class or label is right, predicted and actual."""
    targets = batch["targets"]
    samples = len(outputs)
    if not setting.is_of_classes(tuple(outputs.shape), tuple(targets.shape)):
        outputs, targets, counted = _labels(outputs, targets, setting)
        predicted, actual = (outputs > 0) & counted, (targets > 0.5) & counted
        of_all = {"right": predicted & actual, "predicted": predicted, "actual": actual}
        sums = {name: tf.reduce_sum(tf.cast(one, tf.int32), 1) for name, one in of_all.items()}
        return {**sums, "of_classes": tf.zeros(samples)}
    outputs, targets, counted = _classes(outputs, targets, setting)
    classes = outputs.shape[-1]
    first = tf.range(samples)[:, None] * classes
    predicted = tf.argmax(outputs, -1, output_type=tf.int32)

    def count(of_class: Tensor, which: Tensor) -> Tensor:
        size = samples * classes
        found = tf.math.bincount(tf.boolean_mask(first + of_class, which), minlength=size, maxlength=size)
        return tf.reshape(found, (samples, classes))

    return {
        "right": count(predicted, counted & (predicted == targets)),
        "predicted": count(predicted, counted),
        "actual": count(targets, counted),
        "of_classes": tf.ones(samples),
    }


def entropies(outputs: Tensor, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Return, of each sample, the sum of its cross-entropies and how many there are."""
    given = cross_entropy(outputs, batch, counting=setting.counting, class_axis=setting.class_axis)
    values, weights = given if isinstance(given, Weighted) else (given, tf.ones_like(given))
    return {"entropy": tf.cast(values, tf.float64) * tf.cast(weights, tf.float64), "weight": weights}


def values(outputs: Tensor, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Return outputs and targets as (samples, numbers)."""
    targets = batch["targets"]
    check_comparable(setting.name, tuple(outputs.shape), tuple(targets.shape))
    check_flat(setting, tuple(targets.shape))
    targets = tf.reshape(targets, (len(targets), -1))
    return {"outputs": tf.reshape(outputs, targets.shape), "targets": targets}


def scores(outputs: Tensor, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Return what ranks the samples, (samples, targets, classes), and the targets, -1 if ignored."""
    targets = batch["targets"]
    if not setting.is_of_classes(tuple(outputs.shape), tuple(targets.shape)):
        outputs, targets, counted = _labels(outputs, targets, setting)
        found = tf.cast(targets > 0.5, tf.int8)
    else:
        outputs, found, counted = _classes(outputs, targets, setting)
    return {"scores": outputs, "targets": tf.where(counted, found, tf.constant(-1, found.dtype))}


def _labels(outputs: Tensor, targets: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, targets and whether they count, (samples, places, labels)."""
    mask = mask_of(outputs)
    check_comparable(setting.name, tuple(outputs.shape), tuple(targets.shape))
    axis = setting.label_axis(tuple(outputs.shape), tuple(targets.shape))
    outputs, targets = tf.reshape(outputs, targets.shape), tf.cast(targets, tf.float32)
    looks = setting.counting.of_samples or targets.shape.rank > 1
    counted = targets != setting.counting.ignore_index if looks else tf.ones_like(targets, tf.bool)
    if (masked := shaped_like(mask, targets)) is not None:
        counted &= masked > 0
    is_right = ((targets >= 0) & (targets <= 1)) | ~counted
    check_targets(setting, bool(tf.reduce_all(is_right)), 0)

    def shaped(tensor: Tensor) -> Tensor:
        rest = [i for i in range(tensor.shape.rank) if i != axis]
        tensor = tf.expand_dims(tensor, -1) if axis is None else tf.transpose(tensor, [*rest, axis])
        return tf.reshape(tensor, (len(tensor), -1, tensor.shape[-1]))

    return shaped(outputs), shaped(targets), shaped(counted)


def _classes(outputs: Tensor, targets: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs (samples, places, classes), and class numbers and whether they count."""
    mask = mask_of(outputs)
    outputs, targets = classes_last(setting.name, outputs, targets, setting.class_axis)
    is_soft = targets.shape.rank == outputs.shape.rank
    targets = tf.argmax(targets, -1) if is_soft else tf.cast(targets, tf.int64)
    looks = not is_soft and (setting.counting.of_samples or targets.shape.rank > 1)
    counted = targets != setting.counting.ignore_index if looks else tf.ones_like(targets, tf.bool)
    if (masked := shaped_like(mask, targets)) is not None:
        counted &= masked > 0
    classes, samples = outputs.shape[-1], len(outputs)
    is_right = ((targets >= 0) & (targets < classes)) | ~counted
    check_targets(setting, bool(tf.reduce_all(is_right)), classes)
    shape = samples, -1
    targets = tf.cast(tf.reshape(targets, shape), tf.int32)
    return tf.reshape(outputs, (*shape, classes)), targets, tf.reshape(counted, shape)


FUNCTIONS = MetricFunctions("tf", as_array, object_states, counts, entropies, values, scores)
