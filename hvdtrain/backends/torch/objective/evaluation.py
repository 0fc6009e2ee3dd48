"""Metrics of a whole evaluation in PyTorch; as in ``tensorflow/objective/evaluation.py``."""

from collections.abc import Mapping

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.backends.objective.logits import check_comparable
from hvdtrain.backends.objective.metric_states import Collectives
from hvdtrain.backends.objective.named_metrics import MetricFunctions, Setting, check_flat, check_targets
from hvdtrain.backends.torch.objective.losses import classes_last, cross_entropy
from hvdtrain.backends.torch.objective.metric_objects import object_states
from hvdtrain.backends.torch.program import to_numpy


class HorovodCollectives(Collectives):
    """How objects, as bytes, and the states of metrics move between workers."""

    hvd = hvd
    to_tensor = staticmethod(torch.from_numpy)

    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for: Horovod keeps those."""
        return bool(mpi_ops._handle_map)


Batch = Mapping[str, Tensor]


def as_array(tensor: Tensor) -> NDArray[np.generic]:
    """Return what an update gave as an array: a tensor on any device, or what numpy takes."""
    return to_numpy(tensor.detach().cpu()) if isinstance(tensor, Tensor) else np.asarray(tensor)


def counts(outputs: Tensor, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Return, of each sample, how often each class or label is right, predicted and actual."""
    targets = batch["targets"]
    samples = len(outputs)
    if not setting.is_of_classes(tuple(outputs.shape), tuple(targets.shape)):
        outputs, targets, counted = _labels(outputs, targets, setting)
        predicted, actual = (outputs > 0) & counted, (targets > 0.5) & counted
        of_all = {"right": predicted & actual, "predicted": predicted, "actual": actual}
        sums = {name: one.sum(1) for name, one in of_all.items()}
        return {**sums, "of_classes": torch.zeros(samples)}
    outputs, targets, counted = _classes(outputs, targets, setting)
    classes = outputs.shape[-1]
    first = torch.arange(samples, device=outputs.device)[:, None] * classes
    predicted = outputs.argmax(-1)

    def count(of_class: Tensor, which: Tensor) -> Tensor:
        found = torch.bincount((first + of_class)[which], minlength=samples * classes)
        return found.reshape(samples, classes)

    return {
        "right": count(predicted, counted & (predicted == targets)),
        "predicted": count(predicted, counted),
        "actual": count(targets, counted),
        "of_classes": torch.ones(samples),
    }


def entropies(outputs: Tensor, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Return, of each sample, the sum of its cross-entropies and how many there are."""
    given = cross_entropy(outputs, batch, counting=setting.counting, class_axis=setting.class_axis)
    values, weights = given if isinstance(given, Weighted) else (given, torch.ones_like(given))
    return {"entropy": values.double() * weights, "weight": weights}


def values(outputs: Tensor, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Return outputs and targets as (samples, numbers)."""
    targets = batch["targets"]
    check_comparable(setting.name, tuple(outputs.shape), tuple(targets.shape))
    check_flat(setting, tuple(targets.shape))
    targets = targets.reshape(len(targets), -1)
    return {"outputs": outputs.reshape(targets.shape), "targets": targets}


def scores(outputs: Tensor, batch: Batch, setting: Setting) -> dict[str, Tensor]:
    """Return what ranks the samples, (samples, targets, classes), and the targets, -1 if ignored."""
    targets = batch["targets"]
    if not setting.is_of_classes(tuple(outputs.shape), tuple(targets.shape)):
        outputs, targets, counted = _labels(outputs, targets, setting)
        found = (targets > 0.5).to(torch.int8)
    else:
        outputs, found, counted = _classes(outputs, targets, setting)
        found = found.to(torch.int32)
    return {"scores": outputs, "targets": found.where(counted, -1)}


def _labels(outputs: Tensor, targets: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs, targets and whether they count, (samples, places, labels)."""
    check_comparable(setting.name, tuple(outputs.shape), tuple(targets.shape))
    axis = setting.label_axis(tuple(outputs.shape), tuple(targets.shape))
    outputs, targets = outputs.reshape(targets.shape), targets.float()
    looks = setting.counting.of_samples or targets.dim() > 1
    counted = (
        targets != setting.counting.ignore_index if looks else torch.ones_like(targets, dtype=torch.bool)
    )
    is_right = ((targets >= 0) & (targets <= 1)) | ~counted
    check_targets(setting, bool(is_right.all()), 0)

    def shaped(tensor: Tensor) -> Tensor:
        tensor = tensor.unsqueeze(-1) if axis is None else tensor.movedim(axis, -1)
        return tensor.reshape(len(tensor), -1, tensor.shape[-1])

    return shaped(outputs), shaped(targets), shaped(counted)


def _classes(outputs: Tensor, targets: Tensor, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """Return outputs (samples, places, classes), and class numbers and whether they count."""
    outputs, targets = classes_last(setting.name, outputs, targets, setting.class_axis)
    is_soft = targets.dim() == outputs.dim()
    targets = targets.argmax(-1) if is_soft else targets.long()
    looks = not is_soft and (setting.counting.of_samples or targets.dim() > 1)
    counted = (
        targets != setting.counting.ignore_index if looks else torch.ones_like(targets, dtype=torch.bool)
    )
    classes, samples = outputs.shape[-1], len(outputs)
    is_right = ((targets >= 0) & (targets < classes)) | ~counted
    check_targets(setting, bool(is_right.all()), classes)
    shape = samples, -1
    return outputs.reshape(*shape, classes), targets.reshape(shape), counted.reshape(shape)


FUNCTIONS = MetricFunctions("torch", as_array, object_states, counts, entropies, values, scores)
