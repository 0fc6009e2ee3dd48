"""Metrics of a whole evaluation: those by name, from outputs and targets, and evaluating all of a task."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.logits import check_comparable, class_axis_option, named_loss, of_tensor
from hvdtrain.backends.objective.losses import Counting, NamedLosses, counting_of, mask_of
from hvdtrain.backends.objective.metric_objects import FedObject, is_metric_object
from hvdtrain.backends.objective.stateful_metrics import (
    GatheredMetric,
    Rows,
    RowsState,
    SumMetric,
    ToNumpy,
    on_rank_zero,
)
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers, run_on_rank_zero

Array = NDArray[Any]
Sums = Mapping[str, Array]

# losses whose outputs are logits of classes, of labels, or are no logits; of others, shapes tell
_OF_CLASSES, _OF_LABELS, _NOT_LOGITS = "cross_entropy", "binary_cross_entropy", ("mse", "mae")


class MetricFunctions(NamedTuple):
    """What a framework computes for metrics of a whole evaluation."""

    framework: str  # "torch" or "tf"
    to_numpy: ToNumpy  # returns a tensor, or what an update gave, as an array
    fed_object: type[FedObject]  # of an object of another library
    losses: NamedLosses


@dataclass(frozen=True)
class _Targets:
    """Reads outputs and targets of a batch, as the task describes them."""

    name: str  # the metric, in messages
    counting: Counting  # which targets count
    class_axis: int | None  # the axis of classes or labels, if the task has it
    loss: str  # name of the task's loss; empty if it is a function
    functions: MetricFunctions

    def counts(self, outputs: Any, batch: Mapping[str, Any]) -> Sums:
        """Return, of each sample, how often each class or label is right, predicted and actual."""
        is_of_classes = self._is_of_classes(outputs, batch["targets"])
        if is_of_classes:
            outputs, targets, counted = self._classes(outputs, batch["targets"])
            samples, classes = len(targets), outputs.shape[-1]
            found = self.functions.to_numpy(self.functions.losses.largest(outputs)).reshape(targets.shape)
            first = np.arange(samples)[:, None] * classes
            chosen = {
                "right": (found, counted & (found == targets)),
                "predicted": (found, counted),
                "actual": (targets, counted),
            }
            sums = {
                key: np.bincount((first + of)[which], minlength=samples * classes).reshape(samples, classes)
                for key, (of, which) in chosen.items()
            }
        else:
            scores, targets, counted = self._labels(outputs, batch["targets"])
            predicted, actual = (scores > 0) & counted, (targets > 0.5) & counted
            of_labels = {"right": predicted & actual, "predicted": predicted, "actual": actual}
            sums = {key: one.sum(1) for key, one in of_labels.items()}
        return {**sums, "of_classes": np.full(len(targets), float(is_of_classes))}

    def values(self, outputs: Any, batch: Mapping[str, Any]) -> Sums:
        """Return outputs and targets as (samples, numbers)."""
        check_comparable(self.name, tuple(outputs.shape), tuple(batch["targets"].shape))
        targets = self.functions.to_numpy(batch["targets"])
        targets = targets.reshape(len(targets), -1)
        return {"outputs": self.functions.to_numpy(outputs).reshape(targets.shape), "targets": targets}

    def scores(self, outputs: Any, batch: Mapping[str, Any]) -> Sums:
        """Return what ranks the samples, (samples, targets, classes), and the targets, -1 if ignored."""
        if self._is_of_classes(outputs, batch["targets"]):
            outputs, targets, counted = self._classes(outputs, batch["targets"])
            found = self.functions.to_numpy(outputs).reshape(*targets.shape, -1)
            return {"scores": found, "targets": np.where(counted, targets, -1).astype(np.int32)}
        found, labels, counted = self._labels(outputs, batch["targets"])
        return {"scores": found, "targets": np.where(counted, labels > 0.5, -1).astype(np.int8)}

    def _is_of_classes(self, outputs: Any, targets: Any) -> bool:
        """Return whether outputs are logits of classes, of which one is right, or of labels of their own."""
        if self.loss in _NOT_LOGITS:
            raise TaskError(
                f"{self.name} takes logits, and the task's loss is {self.loss}, whose outputs are none",
                "Use loss cross_entropy or binary_cross_entropy, or write hvdtrain.SumMetric.",
            )
        if self.loss in (_OF_CLASSES, _OF_LABELS):
            return self.loss == _OF_CLASSES
        return [n for n in outputs.shape[1:] if n != 1] != [n for n in targets.shape[1:] if n != 1]

    def _classes(self, outputs: Any, targets: Any) -> tuple[Any, Array, Array]:
        """Return logits with classes last; class numbers and whether they count, (samples, places)."""
        mask = mask_of(outputs)
        outputs, targets = self.functions.losses.classes_last(self.name, outputs, targets, self.class_axis)
        targets, classes = self.functions.to_numpy(targets), outputs.shape[-1]
        is_soft = targets.ndim == len(outputs.shape)
        targets = targets.argmax(-1) if is_soft else targets.astype(np.int64)
        is_right = (targets >= 0) & (targets < classes)
        rule = f"class numbers from 0 to {classes - 1}"
        counted = self._counted(targets, mask, is_right, rule, looks=not is_soft)
        return outputs, targets.reshape(len(targets), -1), counted.reshape(len(targets), -1)

    def _labels(self, outputs: Any, targets: Any) -> tuple[Array, Array, Array]:
        """Return logits, targets and whether they count, (samples, places, labels)."""
        mask, shapes = mask_of(outputs), (tuple(outputs.shape), tuple(targets.shape))
        check_comparable(self.name, *shapes)
        axis = self._label_axis(*shapes)
        targets = self.functions.to_numpy(targets)
        counted = self._counted(targets, mask, (targets >= 0) & (targets <= 1), "0 or 1")

        def shaped(array: Array) -> Array:
            array = array[..., None] if axis is None else np.moveaxis(array, axis, -1)
            return array.reshape(len(array), -1, array.shape[-1])

        found = self.functions.to_numpy(outputs).reshape(targets.shape)
        return shaped(found), shaped(targets), shaped(counted)

    def _counted(self, targets: Array, mask: Any, is_right: Array, rule: str, looks: bool = True) -> Array:
        """Return which targets count: those that are not ignored, and not masked by Keras. Check these."""
        looks = looks and (self.counting.of_samples or targets.ndim > 1)
        counted = targets != self.counting.ignore_index if looks else np.ones(targets.shape, bool)
        if mask is not None:
            masked = self.functions.to_numpy(mask)
            counted &= masked.reshape(*masked.shape, *[1] * (targets.ndim - masked.ndim)) > 0
        if not (is_right | ~counted).all():
            raise TaskError(
                f"{self.name}: targets must be {rule}; the batch has others",
                "If they mark what is to be left out, give the task their number as ignore_index.",
            )
        return counted

    def _label_axis(self, outputs: tuple[int, ...], targets: tuple[int, ...]) -> int | None:
        """Return the axis of the labels in the targets; None if there is one label."""
        if len(targets) < len(outputs) and 1 in outputs[1:]:
            return None
        if self.class_axis is not None and len(targets) > 1:
            return self.class_axis % len(targets)
        if len(targets) <= 2:
            return 1 if len(targets) > 1 else None
        if 1 in (targets[1], targets[-1]):
            return 1 if targets[1] == 1 else len(targets) - 1
        raise TaskError(
            f"{self.name} cannot tell which axis holds the labels: outputs {outputs} and targets {targets}",
            "Set class_axis in the task: -1 (batch, ..., labels) or 1 (batch, labels, ...). Of one label, "
            "give outputs and targets an axis of length 1.",
        )


def _averaged(kind: str, sums: Sums) -> float:
    """Return the mean ratio, 0 for 0/0, of the labels, or of the classes in targets or predictions."""
    right, predicted, actual = sums["right"], sums["predicted"], sums["actual"]
    part, whole = {
        "precision": (right, predicted),
        "recall": (right, actual),
        "f1": (2 * right, predicted + actual),
        "mean_iou": (right, predicted + actual - right),
    }[kind]
    ratios = part / np.where(whole > 0, whole, 1.0)
    return _mean(ratios[predicted + actual > 0] if sums["of_classes"] > 0 or kind == "mean_iou" else ratios)


def r2(rows: Sums) -> float:
    """Return the coefficient of determination: the mean over the targets' numbers."""
    from sklearn.metrics import r2_score

    targets, outputs = rows["targets"].astype(np.float64), rows["outputs"].astype(np.float64)
    if len(targets) < 2 or not (np.isfinite(outputs).all() and np.isfinite(targets).all()):
        return float("nan")
    return float(r2_score(targets, outputs))


def auc(rows: Sums) -> float:
    """Return the area under the ROC curve: the mean over labels, or over classes, each against the rest.

    Labels and classes of which all samples, or none, are positive have none and are left out.
    """
    from sklearn.metrics import roc_auc_score

    scores, targets = rows["scores"], rows["targets"]
    of_labels = scores.ndim == targets.ndim
    scores = scores.reshape(-1, scores.shape[-1])
    if np.isnan(scores).any():
        return float("nan")
    largest = np.finfo(scores.dtype).max
    scores = np.clip(scores, -largest, largest)  # scikit-learn takes no infinity, and the order stays
    targets = targets.reshape(scores.shape if of_labels else -1)
    if not of_labels:  # logarithms of probabilities rank samples as these do; in fp64, without new ties
        scores = scores - scores.max(1, keepdims=True).astype(np.float64)
        scores -= np.log(np.exp(scores).sum(1, keepdims=True))
    areas = []
    for one in range(scores.shape[-1]):
        own = targets[:, one] if of_labels else targets
        is_positive = own[own >= 0] == (1 if of_labels else one)
        if 0 < is_positive.sum() < len(is_positive):
            areas.append(roc_auc_score(is_positive, scores[own >= 0, one]))
    return _mean(np.asarray(areas))


def _mean(values: Array) -> float:
    return float(values.mean()) if values.size else float("nan")


# by name: what each sample gives, the metric, and its formula
_METRICS: dict[str, tuple[Callable[..., Sums], Callable[..., Any], Callable[[Any], float]]] = {
    **{
        kind: (_Targets.counts, SumMetric, partial(_averaged, kind))
        for kind in ("precision", "recall", "f1", "mean_iou")
    },
    "r2": (_Targets.values, GatheredMetric, r2),
    "auc": (_Targets.scores, GatheredMetric, auc),
}
NAMES = frozenset(_METRICS)


def _named_metric(name: str, kind: str, task: Any, functions: MetricFunctions) -> Any:
    loss, _ = named_loss(getattr(task, "loss", None), functions.framework)
    class_axis = class_axis_option(task).get("class_axis")
    loss_name = loss if isinstance(loss, str) else ""
    targets = _Targets(f"metrics[{name!r}]", counting_of(task, loss), class_axis, loss_name, functions)
    update, metric, compute = _METRICS[kind]
    return metric(of_tensor(kind, partial(update, targets)), compute)


# what an evaluation's call of the model gave: (outputs, batch), or nothing if there are no such metrics
Seen = tuple[Any, ...]


def is_stateful(metric: Any) -> bool:
    """Return whether a task's metric is one of a whole evaluation, and not a mean over samples."""
    is_named = isinstance(metric, str) and metric in NAMES
    return is_named or isinstance(metric, SumMetric | GatheredMetric) or is_metric_object(metric)


class EvaluationMetrics:
    """The metrics of a whole evaluation of one task."""

    def __init__(self, task: Any, functions: MetricFunctions) -> None:
        self._states: dict[str, RowsState] = {}
        self._seen: Seen = ()
        self.tried: dict[str, float] = {}  # the metrics of the last micro-batch that was tried out
        found: SumMetric | GatheredMetric
        given = {} if hasattr(task, f"{functions.framework}_loss") else getattr(task, "metrics", {})
        for name, metric in given.items():
            if is_metric_object(metric):
                fed = functions.fed_object(name, metric, task)
                found = GatheredMetric(fed.rows, fed.computed, fed.given.max_bytes)
            elif is_stateful(metric):
                found = _named_metric(name, metric, task, functions) if isinstance(metric, str) else metric
            else:
                continue
            self._states[name] = RowsState(name, found, functions.to_numpy)
        self.order = tuple(given) if self._states else ()

    def __bool__(self) -> bool:
        return bool(self._states)

    def watch(self, outputs: Any, batch: Mapping[str, Any]) -> None:
        """Keep the outputs and the batch of a call of the model, for ``take``."""
        self._seen = outputs, batch

    def take(self) -> Seen:
        """Return what was kept of the last call, and forget it."""
        seen, self._seen = self._seen, ()
        return seen

    def begin(self) -> None:
        """Begin an evaluation."""
        for state in self._states.values():
            state.begin()

    def add(self, seen: Seen, rows: Rows) -> None:
        """Add a micro-batch."""
        for state in self._states.values():
            state.add(seen[0], seen[1], rows)

    def try_out(self, seen: Seen, rows: Rows) -> None:
        """Compute the metrics of one micro-batch of this worker, and forget it. Local: no collective."""
        self.begin()
        try:
            self.tried = {name: state.tried(seen[0], seen[1], rows) for name, state in self._states.items()}
        finally:
            self.begin()

    def computed(self, workers: Workers) -> dict[str, float]:
        """Collective. Return the metrics of the evaluation, by name."""
        found: dict[str, float] = {}
        try:
            for name, state in self._states.items():  # one after the other: gathered rows take memory
                of_workers = on_rank_zero(state.parts(), workers)
                found[name] = run_on_rank_zero(workers, partial(state.value, of_workers))
        finally:
            self.begin()
        return found
