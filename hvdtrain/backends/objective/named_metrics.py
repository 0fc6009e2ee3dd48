"""Metrics of a whole evaluation by name: what they are computed from, and their formulas in numpy."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import Counting, counting_of
from hvdtrain.backends.objective.logits import class_axis_option, named_loss, of_tensor
from hvdtrain.backends.objective.metric_states import GatheredState, R2State, SumState, ToNumpy
from hvdtrain.backends.objective.stateful_metrics import GatheredMetric, StatefulMetric, SumMetric, Update
from hvdtrain.errors import TaskError

Sums = Mapping[str, NDArray[Any]]

# losses whose outputs are logits of classes, of labels, or are no logits; of others, shapes tell
_OF_CLASSES, _OF_LABELS, _NOT_LOGITS = "cross_entropy", "binary_cross_entropy", ("mse", "mae")


@dataclass(frozen=True)
class Setting:
    """What a task says of the targets of its named metrics."""

    name: str  # the metric, in messages
    counting: Counting  # which targets count
    class_axis: int | None  # the axis of classes or labels, if the task has it
    loss: str  # name of the task's loss; empty if it is a function

    def is_of_classes(self, outputs: tuple[int, ...], targets: tuple[int, ...]) -> bool:
        """Return whether outputs are logits of classes, of which one is right, or of labels of their own.

        Raises:
            TaskError: If the task's loss takes outputs that are no logits.
        """
        if self.loss in _NOT_LOGITS:
            raise TaskError(
                f"{self.name} takes logits, and the task's loss is {self.loss}, whose outputs are none",
                "Use loss cross_entropy or binary_cross_entropy, or write hvdtrain.SumMetric.",
            )
        if self.loss in (_OF_CLASSES, _OF_LABELS):
            return self.loss == _OF_CLASSES
        return [n for n in outputs[1:] if n != 1] != [n for n in targets[1:] if n != 1]

    def label_axis(self, outputs: tuple[int, ...], targets: tuple[int, ...]) -> int | None:
        """Return the axis of the labels in the targets; None if there is one label.

        Raises:
            TaskError: If shapes do not tell.
        """
        if len(targets) < len(outputs) and 1 in outputs[1:]:
            return None
        if self.class_axis is not None and len(targets) > 1:
            return self.class_axis % len(targets)
        if len(targets) <= 2:
            return 1 if len(targets) > 1 else None
        fitting = [axis for axis in (1, len(targets) - 1) if targets[axis] == 1]
        if fitting:
            return fitting[0]
        raise TaskError(
            f"{self.name} cannot tell which axis holds the labels: outputs {outputs} and targets {targets}",
            "Set class_axis in the task: -1 (batch, ..., labels) or 1 (batch, labels, ...). Of one label, "
            "give outputs and targets an axis of length 1.",
        )


class MetricFunctions(NamedTuple):
    """What a framework computes for metrics of a whole evaluation."""

    framework: str  # "torch" or "tf"
    to_numpy: ToNumpy  # returns a tensor as an array
    # (name, metric, task) -> by name, the states of a metric that is an object of another library
    object_states: Callable[[str, Any, Any], Mapping[str, StatefulMetric]]
    # (outputs, batch, setting), as those below -> by class or label, right ones, predicted ones and actual
    # ones
    counts: Callable[..., Mapping[str, Any]]
    entropies: Callable[..., Mapping[str, Any]]  # cross-entropy and the number of targets that count
    values: Callable[..., Mapping[str, Any]]  # outputs and targets as (samples, numbers)
    # the logits of each class or label; and the targets, -1 if ignored
    scores: Callable[..., Mapping[str, Any]]


def precision(sums: Sums) -> float:
    """Return the share of the predicted ones that are right; 0 of a class that is not predicted."""
    return _macro(_ratio(sums["right"], sums["predicted"]), sums)


def recall(sums: Sums) -> float:
    """Return the share of the actual ones that are predicted; 0 of a class that does not occur."""
    return _macro(_ratio(sums["right"], sums["actual"]), sums)


def f1(sums: Sums) -> float:
    """Return the harmonic mean of precision and recall."""
    return _macro(_ratio(2 * sums["right"], sums["predicted"] + sums["actual"]), sums)


def mean_iou(sums: Sums) -> float:
    """Return intersection over union, of the classes that occur in targets or predictions."""
    union = sums["predicted"] + sums["actual"] - sums["right"]
    return _mean(_ratio(sums["right"], union)[union > 0])


def perplexity(sums: Sums) -> float:
    """Return the exponential of the mean cross-entropy."""
    weight = float(sums["weight"])
    with np.errstate(over="ignore"):
        return float(np.exp(sums["entropy"] / weight)) if weight else float("nan")


def auc(rows: Sums) -> float:
    """Return the area under the ROC curve: the mean over labels, or over classes, each against the rest.

    Labels and classes of which all samples, or none, are positive have none and are left out.
    """
    scores, targets = rows["scores"], rows["targets"]
    of_labels = scores.ndim == targets.ndim
    scores = scores.reshape(-1, scores.shape[-1])
    if np.isnan(scores).any():
        return float("nan")
    targets = targets.reshape(scores.shape if of_labels else -1)
    # logarithms of probabilities rank samples as these do; in fp64, which makes no new ties
    share = 0.0 if of_labels else _log_sums(scores)
    areas = []
    for one in range(scores.shape[-1]):
        own = targets[:, one] if of_labels else targets
        counted = own >= 0
        areas.append(_area((scores[:, one] - share)[counted], own[counted] == (1 if of_labels else one)))
    found = np.asarray(areas)
    return _mean(found[~np.isnan(found)])


_OF_COUNTS = {metric.__name__: metric for metric in (precision, recall, f1, mean_iou)}
NAMES = frozenset({*_OF_COUNTS, "perplexity", "r2", "auc"})


def named_metric(name: str, kind: str, task: Any, functions: MetricFunctions) -> StatefulMetric:
    """Return the state of a named metric.

    Args:
        name: what the task calls it.
        kind: one of ``NAMES``.
        task: the task.
        functions: what the framework computes.
    """
    loss, _ = named_loss(getattr(task, "loss", None), functions.framework)
    of_loss = counting_of(task, loss)
    counting = Counting(of_loss.ignore_index, of_loss.of_samples)
    axis = class_axis_option(task).get("class_axis")
    setting = Setting(f"metrics[{name!r}]", counting, axis, loss if isinstance(loss, str) else "")

    def update_by(function: Callable[..., Mapping[str, Any]]) -> Update:
        return of_tensor(kind, partial(function, setting=setting))

    if kind == "r2":
        return R2State(name, update_by(functions.values), functions.to_numpy)
    if kind == "auc":
        return GatheredState(name, GatheredMetric(update_by(functions.scores), auc), functions.to_numpy)
    if kind == "perplexity":
        return SumState(name, SumMetric(update_by(functions.entropies), perplexity), functions.to_numpy)
    return SumState(name, SumMetric(update_by(functions.counts), _OF_COUNTS[kind]), functions.to_numpy)


def check_targets(setting: Setting, is_right: bool, classes: int) -> None:
    """Check that all targets of a batch that count are classes of the outputs, or 0 to 1 for labels.

    Args:
        setting: what the task says.
        is_right: whether they are.
        classes: number of classes of the outputs; 0 if they are labels.

    Raises:
        TaskError: If they are not.
    """
    if is_right:
        return
    numbers = f"class numbers from 0 to {classes - 1}" if classes else "0 or 1"
    raise TaskError(
        f"{setting.name}: targets must be {numbers}; the batch has others",
        "If they mark what is to be left out, give the task their number as ignore_index.",
    )


def check_flat(setting: Setting, shape: tuple[int, ...]) -> None:
    """Check that targets are (samples,) or (samples, numbers).

    Raises:
        TaskError: If they have more axes.
    """
    if len(shape) > 2:
        raise TaskError(
            f"{setting.name}: r2 takes targets (samples,) or (samples, numbers), found {shape}",
            "Flatten them in the data and the outputs in the model, or write hvdtrain.SumMetric.",
        )


def _ratio(part: NDArray[Any], whole: NDArray[Any]) -> NDArray[np.float64]:
    ratio: NDArray[np.float64] = part / np.where(whole > 0, whole, 1.0)
    return ratio


def _macro(values: NDArray[np.float64], sums: Sums) -> float:
    """Return the mean over labels, or over the classes that occur in targets or predictions."""
    if sums["of_classes"] > 0:
        values = values[sums["predicted"] + sums["actual"] > 0]
    return _mean(values)


def _mean(values: NDArray[np.float64]) -> float:
    return float(values.mean()) if values.size else float("nan")


def _log_sums(logits: NDArray[Any]) -> NDArray[np.float64]:
    """Return the logarithm of each row's sum of exponentials."""
    largest = logits.max(1).astype(np.float64)
    sums = np.zeros(len(logits))
    for column in logits.T:  # a copy of all rows in fp64 might take more memory than there is
        sums += np.exp(column - largest)
    result: NDArray[np.float64] = largest + np.log(sums)
    return result


def _area(scores: NDArray[Any], is_positive: NDArray[np.bool_]) -> float:
    """Return the area under one ROC curve, by ranks; ties count half."""
    positives = int(is_positive.sum())
    negatives = len(is_positive) - positives
    if not positives or not negatives:
        return float("nan")
    _, place, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2
    above = ranks[place.reshape(-1)][is_positive].sum() - positives * (positives + 1) / 2
    return float(above / (positives * negatives))
