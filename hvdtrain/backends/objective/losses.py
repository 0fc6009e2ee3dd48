"""Losses and metrics by name, described once; a framework's ``objective/losses.py`` has their operations.

Each takes (outputs, batch) and gives one value per sample, or values and weights per sample if targets can
be left out or have weights. Classes stand on the last axis of outputs, or on axis 1; values of a sequence or
an image are averaged within the sample, over the targets that count.
"""

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np

from hvdtrain.backends.objective.logits import check_comparable, class_axis_of
from hvdtrain.errors import TaskError


class Weighted(NamedTuple):
    """Values that count with weights: what a loss or metric may return in place of one value per sample.

    The result of a step is sum(weights * values) / sum(weights), over all samples of all workers. Both
    have the shape (samples,); or both are single numbers: the mean of a batch, and what it is a mean over,
    such as the number of its rows or tokens. No gradient flows through weights.

    Attributes:
        values: the values; the loss is differentiated through them.
        weights: their weights, finite and not negative.
    """

    values: Any
    weights: Any


IGNORE_INDEX = -100  # as in PyTorch


@dataclass(frozen=True)
class Counting:
    """Which targets a named loss or metric counts, and how much."""

    ignore_index: int = IGNORE_INDEX  # the target that does not count
    # whether it is looked for if a sample has one target, too, and not only if it has several
    of_samples: bool = False
    class_weights: tuple[float, ...] | None = None
    batch_weights: bool = False


OF_METRICS = Counting()


def counting_of(task: Any, loss: Any) -> Counting:
    """Return what the task says of the targets that its loss counts.

    To look for ignored targets among one per sample costs a tenth of a small model's step. It is done if the
    task has ``ignore_index``, or another loss, which may ignore some. Otherwise cross_entropy refuses them.
    """
    ignored = getattr(task, "ignore_index", IGNORE_INDEX)
    of_samples = hasattr(task, "ignore_index") or loss != "cross_entropy"
    if not isinstance(ignored, numbers.Integral) or isinstance(ignored, bool):
        raise TaskError(
            f"the task's ignore_index must be a class number that does not count, found {ignored!r}",
            f"Give an integer, or leave it out: the default is {IGNORE_INDEX}.",
        )
    given = getattr(task, "class_weights", None)
    if given is not None and loss != "cross_entropy":
        found = "a function of its own" if callable(loss) else loss
        raise TaskError(
            f"class_weights acts on the named loss cross_entropy; the task's loss is {found}",
            "Leave class_weights out, or return hvdtrain.Weighted(losses, weights) from the task's loss.",
        )
    weights = None if given is None else _class_weights(given)
    return Counting(int(ignored), of_samples, weights, batch_weights=True)


def _class_weights(given: Any) -> tuple[float, ...]:
    """Return the weights of the classes, with a mean of 1: only their ratios matter."""
    try:
        found = tuple(float(weight) for weight in given)
    except (TypeError, ValueError):
        found = ()
    is_right = not isinstance(given, Mapping | str) and all(0 <= w < math.inf for w in found)
    if not is_right or not sum(found):
        raise TaskError(
            f"the task's class_weights must be numbers of at least 0, one for each class; found {given!r}",
            "Give a list of finite numbers, such as [1.0, 4.0], of which at least one is not 0.",
        )
    return tuple(weight * len(found) / sum(found) for weight in found)


Tensor = Any
Batch = Mapping[str, Tensor]
PerSample = Any  # a tensor (samples,), or Weighted


T = TypeVar("T")


class Values(NamedTuple, Generic[T]):
    """What an objective gave for the samples of one micro-batch."""

    losses: T  # (samples,), fp32 or fp64, with gradient
    loss_weights: T | None  # (samples,), without gradient; None if the loss has no weights of its own
    # (numbers, samples): for each name the values, times their weights; then the weights of each name that
    # has some. Their sums, weighted by sample, are reduced
    rows: T


def mask_of(outputs: Any) -> Any:
    """Return the mask of Keras that outputs have; None if they have none."""
    return getattr(outputs, "_keras_mask", None)


@dataclass(frozen=True)
class NamedLosses:
    """The named losses and metrics over a framework's operations."""

    rank: Callable[[Tensor], Any]  # returns the number of axes
    floats: Callable[[Tensor], Tensor]  # casts to float32
    is_floating: Callable[[Tensor], bool]
    largest: Callable[[Tensor], Tensor]  # returns where the largest number of the last axis is
    moved_last: Callable[[Tensor, int], Tensor]  # moves an axis to the end
    # gives outputs the targets' shape, and targets their type
    aligned: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    with_zeros: Callable[[Tensor, Tensor], Tensor]  # returns class numbers, 0 for those that do not count
    looked_up: Callable[[tuple[float, ...], Tensor], Tensor]  # returns the weight of each class number
    # (outputs, targets, those of them that count, ignore_index, label_smoothing)
    entropies: Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
    compared: Callable[[str, Tensor, Tensor], Tensor]  # returns a named loss or metric of each output
    is_largest: Callable[[Tensor, Tensor], Tensor]  # of the logits of class numbers
    is_in_top5: Callable[[Tensor, Tensor], Tensor]
    # returns the mean within each sample; if there are weights, the weighted one with its weight, a sum over
    # axis 1, so that it does not depend on how far a batch is padded
    means: Callable[[Tensor, Tensor | None], PerSample]

    @property
    def table(self) -> dict[str, Callable[..., PerSample]]:
        """The functions by name."""
        compared = ("binary_cross_entropy", "mse", "mae", "binary_accuracy")
        return {
            "cross_entropy": self._cross_entropy,
            **{name: partial(self._compared, name) for name in compared},
            **{name: partial(self._ranked, name) for name in ("accuracy", "top5_accuracy")},
        }

    def _cross_entropy(
        self,
        outputs: Tensor,
        batch: Batch,
        label_smoothing: float = 0.0,
        counting: Counting = OF_METRICS,
        class_axis: int | None = None,
    ) -> PerSample:
        """Cross-entropy of logits (batch, ..., classes) with class numbers (batch, ...) or probabilities.

        The target is (1 - label_smoothing) * onehot + label_smoothing / classes. What a target's class weighs
        applies to the whole of its loss.
        """
        mask = mask_of(outputs)
        outputs, targets = self.classes_last("cross_entropy", outputs, batch["targets"], class_axis)
        counted = self._counted(targets, counting, self._is_soft(outputs, targets))
        classes = targets if counted is None else self.with_zeros(targets, counted)
        losses = self.entropies(outputs, targets, classes, counting.ignore_index, label_smoothing)
        weights = _product(counted, self._shaped_like(losses, mask))
        if counting.class_weights is not None:
            soft, given = self._is_soft(outputs, targets), len(counting.class_weights)
            if soft or given != outputs.shape[-1]:
                found = f"{given} numbers; the model's outputs have {outputs.shape[-1]} classes"
                raise TaskError(
                    f"class_weights has {found}{', and the targets are a probability for each' * soft}",
                    "Give class_weights one number for each class, and targets that are class numbers; or "
                    "return hvdtrain.Weighted(losses, weights) from the task's loss.",
                )
            weights = _product(weights, self.looked_up(counting.class_weights, classes))
        return self.means(losses, _product(weights, self._of_batch("cross_entropy", losses, batch, counting)))

    def classes_last(
        self, name: str, outputs: Tensor, targets: Tensor, class_axis: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return logits with the classes last, and targets (batch, ...) or, soft, of their shape."""
        rank, of_targets = self.rank(outputs), self.rank(targets)
        if rank is None or (rank == 2 and of_targets == 1 and outputs.shape[1] != 1):
            return outputs, targets
        axis = class_axis_of(name, tuple(outputs.shape), tuple(targets.shape), class_axis)
        if rank == of_targets and outputs.shape == targets.shape:
            if not self.is_floating(targets):
                raise TaskError(
                    f"{name} takes class numbers, or a probability for each class; found whole numbers of "
                    f"the logits' shape {tuple(targets.shape)}",
                    "Of one-hot targets take .argmax(-1), or .astype('float32'); for several labels of one "
                    "sample, use binary_cross_entropy.",
                )
            return self.moved_last(outputs, axis), self.moved_last(targets, axis)
        # where not all of the outputs' shape is known
        if of_targets == rank and targets.shape[-1] not in (1, None):
            raise TaskError(
                f"{name} takes class numbers (batch, ...), or probabilities of the logits' shape; found "
                f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
                "Let the model give outputs whose shape is known, for example by tf.ensure_shape.",
            )
        return self.moved_last(outputs, axis), targets if of_targets < rank else targets[..., 0]

    def _compared(self, name: str, outputs: Tensor, batch: Batch, counting: Counting = OF_METRICS) -> Any:
        """Return what compares each output with a target."""
        mask, targets = mask_of(outputs), batch["targets"]
        check_comparable(name, tuple(outputs.shape), tuple(targets.shape))
        outputs, targets = self.aligned(outputs, targets)
        weights = self._shaped_like(targets, mask)
        if name != "binary_accuracy":
            weights = _product(weights, self._of_batch(name, targets, batch, counting))
        counted = self._counted(targets, counting) if name.startswith("binary") else None
        return self.means(self.compared(name, outputs, targets), _product(counted, weights))

    def _ranked(
        self,
        name: str,
        outputs: Tensor,
        batch: Batch,
        counting: Counting = OF_METRICS,
        class_axis: int | None = None,
    ) -> PerSample:
        """Return whether the target's logit is the largest, or among the five largest."""
        mask = mask_of(outputs)
        outputs, targets = self.classes_last(name, outputs, batch["targets"], class_axis)
        soft = self._is_soft(outputs, targets)
        counted = self._counted(targets, counting, soft)
        targets = self.largest(targets) if soft else targets
        if name == "accuracy":
            right = self.is_largest(outputs, targets)
        else:
            chosen = targets if counted is None else self.with_zeros(targets, counted)
            right = self.is_in_top5(outputs, chosen)
        return self.means(self.floats(right), _product(counted, self._shaped_like(targets, mask)))

    def _is_soft(self, outputs: Tensor, targets: Tensor) -> bool:
        """Return whether targets are a probability for each class."""
        return bool(self.rank(targets) == self.rank(outputs))

    def _counted(self, targets: Tensor, counting: Counting, soft: bool = False) -> Tensor | None:
        """Return 1 for each target that counts and 0 for others; None if all of them do."""
        if soft or (self.rank(targets) == 1 and not counting.of_samples):
            return None
        return self.floats(targets != counting.ignore_index)

    def _of_batch(self, name: str, targets: Tensor, batch: Batch, counting: Counting) -> Tensor | None:
        """Return the weights that a batch has, of the targets' rank; None if it has none."""
        if not (counting.batch_weights and "weights" in batch):
            return None
        weights, shape = tuple(batch["weights"].shape), tuple(targets.shape)
        if weights not in (shape[:1], shape):
            raise TaskError(
                f"{name} takes batch['weights'] per sample, {shape[:1]}, or per target, {shape}; "
                f"found shape {weights}",
                "Give the samples weights of one of these shapes, or name the key differently.",
            )
        return self._shaped_like(targets, batch["weights"])

    def _shaped_like(self, targets: Tensor, weights: Tensor | None) -> Tensor | None:
        """Return weights as floats of the targets' rank; None if there are none."""
        if weights is None:
            return None
        return self.floats(weights)[(..., *[None] * (self.rank(targets) - self.rank(weights)))]


def _product(one: Tensor | None, other: Tensor | None) -> Tensor | None:
    """Return the product of weights; None stands for weights that are all 1."""
    if one is None or other is None:
        return other if one is None else one
    return one * other


def check_values(given: Mapping[str, Any], samples: int | None) -> None:
    """Check the shapes of a loss, the first, and of metrics."""
    for index, (name, value) in enumerate(given.items()):
        what = name if index else "the loss"
        if not isinstance(value, Weighted):
            shape = tuple(value.shape) if hasattr(value, "shape") else None
            if shape != (samples,):
                found = f"a {type(value).__name__}" if shape is None else f"shape {shape}"
                raise TaskError(
                    f"{what} must give one value per sample, shape ({samples},); found {found}",
                    "Take the mean over all axes but the first, and no mean over samples. If it is the mean "
                    "of a batch, give hvdtrain.Weighted(mean, number of rows or tokens). What a sample alone "
                    "does not have, such as F1, is a metric of the whole evaluation.",
                )
            continue
        values, weights = (tuple(np.shape(part)) for part in value)
        if values != weights or values not in ((), (samples,)):
            raise TaskError(
                f"{what} is Weighted: values and weights must both have the shape ({samples},), or be one "
                f"number each; found {values} and {weights}",
                "Give a value and a weight for each sample, or the batch's mean and what it is a mean over.",
            )
        if not index and getattr(value.weights, "requires_grad", False):
            raise TaskError(
                f"the weights of {what} depend on the model's parameters; no gradient flows through weights",
                "Give weights.detach(), or multiply the values and return them without Weighted.",
            )


def sample_values(names: Sequence[str], weighted: Sequence[str], rows: Any, weights: Any) -> dict[str, Any]:
    """Return name to array (samples,), whose plain mean over the samples is the mean over what counts."""
    found = dict(zip(names, rows, strict=False))
    for name, own in zip(weighted, rows[len(names) :], strict=True):
        found[name] = found[name] / ((weights * own).sum() / (weights.sum() or 1.0) or 1.0)
    return found
