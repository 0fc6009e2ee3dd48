"""Metric objects of torchmetrics and Keras: which are taken, and what they are given."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import counting_of
from hvdtrain.backends.objective.logits import class_axis_option, logits_of, named_loss
from hvdtrain.backends.objective.stateful_metrics import MAX_BYTES, GatheredMetric
from hvdtrain.data.unsupported import has_class, type_name
from hvdtrain.errors import TaskError
from hvdtrain.workers.user_errors import where_raised

Array = NDArray[Any]
Function = Callable[[Any, Mapping[str, Any]], Any]

_LIBRARIES = {"torch": "torchmetrics", "tf": "Keras"}
# what makes an object a metric of a framework, by package and class
_BASES = {
    "torchmetrics.Metric": "torch",
    "torchmetrics.MetricCollection": "torch",
    "keras.Metric": "tf",
}
# the named losses that take logits, and what makes probabilities of them
_ACTIVATIONS = {"binary_cross_entropy": "sigmoid", "cross_entropy": "softmax"}
_OF_VALUES = (
    "takes values and weights, and not targets and predictions",
    "Write a function of (outputs, batch) that returns one value per sample, or hvdtrain.SumMetric.",
)
# by package and class, which may be a base class: why an object is not taken, and what to do
_REFUSED = {
    "torchmetrics.Running": (
        "looks at the last batches only",
        "Give the metric that it wraps: it is computed of the whole evaluation.",
    ),
    "torchmetrics.BaseAggregator": _OF_VALUES,
}
_MOST_NUMBERS = 1 << 20  # of predictions, or of targets, that an object is given at once


@dataclass(frozen=True, kw_only=True)
class MetricObject:
    """A metric object of torchmetrics or Keras, and what it is given in place of outputs and targets.

    Attributes:
        torch: an object of torchmetrics, its class, or a function without arguments that makes one; None if
            a job with PyTorch cannot have this metric.
        tf: likewise, one of Keras.
        preds: a function of (outputs, batch) that returns what the object compares with the targets.
        targets: a function of (outputs, batch) that returns the targets; by default ``batch["targets"]``.
        result: a function that takes what the object computes and returns the one number that is logged.
        max_bytes: what predictions and targets of all samples may take on rank 0.
    """

    torch: Any = None
    tf: Any = None
    preds: Function | None = None
    targets: Function | None = None
    result: Callable[[Any], Any] | None = None
    max_bytes: int = MAX_BYTES


@dataclass(frozen=True)
class TakenObject:
    """One metric object of a task, with all that is to be known of it.

    Attributes:
        metric: the object, of the job's framework.
        given: what it is given in place of outputs and targets.
        activation: "sigmoid" or "softmax" if outputs are logits, which makes probabilities of them.
        ignore_index: the target that the loss leaves out; None if it leaves out none.
    """

    name: str
    metric: Any
    given: MetricObject
    activation: str = ""
    ignore_index: int | None = None
    class_axis: int | None = None

    def error(self, problem: str, remedy: str) -> TaskError:
        """Return the error of something that the object cannot be used with."""
        return TaskError(f"metrics[{self.name!r}], a {type(self.metric).__name__}, {problem}", remedy)


def is_metric_object(value: Any) -> bool:
    """Return whether a task's metric is a MetricObject, or an object or class of torchmetrics or Keras."""
    return isinstance(value, MetricObject) or bool(_framework_of(value))


def logged_names(metrics: Any, task: Any, framework: str) -> list[str]:
    """Return what a task's metrics are logged as: their names, and those of a collection's members."""
    if not isinstance(metrics, Mapping):
        return []  # which is refused when the model is built
    names: list[str] = []
    for name, value in metrics.items():
        taken = taken_objects(name, value, task, framework) if is_metric_object(value) else []
        names += [one.name for one in taken] or [name]
    return names


def taken_objects(name: str, value: Any, task: Any, framework: str) -> list[TakenObject]:
    """Return the objects of a task's metric: one, or those of a collection."""
    given = value if isinstance(value, MetricObject) else MetricObject(**{_framework_of(value): value})
    metric = _own_object(name, given, framework)
    members = {name: metric}
    if has_class(metric, "torchmetrics.MetricCollection"):
        items = metric.items(keep_base=False, copy_state=False)
        members = {f"{name}_{member}": one for member, one in items}
    loss, _ = named_loss(getattr(task, "loss", None), framework)
    activation = _ACTIVATIONS.get(loss, "") if isinstance(loss, str) else ""
    ignores = bool(activation) or hasattr(task, "ignore_index")
    ignored = counting_of(task, loss).ignore_index if ignores else None
    class_axis = class_axis_option(task).get("class_axis")
    taken = [TakenObject(key, one, given, activation, ignored, class_axis) for key, one in members.items()]
    for one in taken:
        _check_taken(one)
    return taken


def _own_object(name: str, given: MetricObject, framework: str) -> Any:
    """Return the object of the job's framework; a function is called for it."""
    library = _LIBRARIES[framework]
    found = getattr(given, framework)
    if found is None:
        other = "tf" if framework == "torch" else "torch"
        raise TaskError(
            f"metrics[{name!r}] is of {_LIBRARIES[other]}, and this job runs --framework {framework}",
            f"Give both, hvdtrain.MetricObject(torch=..., tf=...), or a metric of hvdtrain in place of it; "
            f"{framework} is to be an object of {library}, or a function that makes one.",
            everywhere=True,
        )
    if isinstance(found, type) or (not _framework_of(found) and callable(found)):
        try:
            found = found()
        except Exception as error:
            raise TaskError(
                f"metrics[{name!r}] cannot be constructed: {where_raised(error, own_only=True)}",
                "Give an object, or a function that is called without arguments, on every worker.",
                everywhere=True,
            ) from error
    if _framework_of(found) != framework:
        raise TaskError(
            f"metrics[{name!r}] must be an object of {library} if the job runs --framework {framework}; "
            f"found a {type_name(found)}",
            "Give each framework its own: hvdtrain.MetricObject(torch=..., tf=...).",
            everywhere=True,
        )
    return found


def _check_taken(taken: TakenObject) -> None:
    """Check that an object is none of those whose numbers would be wrong."""
    metric = taken.metric
    reason = next((why for base, why in _REFUSED.items() if has_class(metric, base)), None)
    if reason is None and _framework_of(metric) == "tf" and "values" in _parameters(metric.update_state):
        reason = _OF_VALUES  # keras.metrics.Mean and Sum; other means compare targets and predictions
    if reason:
        error = taken.error(*reason)
        error.everywhere = True
        raise error


def in_call_order(update: Callable[..., Any], preds: Any, targets: Any, targets_first: bool) -> Any:
    """Call an object's update: by the names of its arguments, or by position if they do not tell."""
    names = _parameters(update)
    for of_preds, of_targets in (("preds", "target"), ("y_pred", "y_true")):
        if of_preds in names and of_targets in names:
            return update(**{of_preds: preds, of_targets: targets})
    return update(targets, preds) if targets_first else update(preds, targets)


def is_same_but_units(preds: Any, targets: Any) -> bool:
    """Return whether the shapes of two tensors differ by axes of length 1 only."""
    one, other = ([n for n in tensor.shape[1:] if n != 1] for tensor in (preds, targets))
    return one == other and len(preds) == len(targets)


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _framework_of(value: Any) -> str:
    """Return the framework whose library an object, or a class, is a metric of; nothing if it is none."""
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    names = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in kinds]
    return next((framework for base, framework in _BASES.items() if base in names), "")


class FedObject(ABC):
    """A metric object that is given the rows of all samples, on rank 0 and in the order of the data set.

    Args:
        ignores: the targets that the object leaves out itself.
    """

    def __init__(self, taken: TakenObject, ignores: Container[Any]) -> None:
        self.taken = taken
        self._must_not_have = None if taken.ignore_index in ignores else taken.ignore_index

    @abstractmethod
    def _reset(self) -> None:
        """Reset the object."""

    @abstractmethod
    def _update(self, preds: Array, targets: Array, mask: Array | None) -> None:
        """Update the object."""

    @abstractmethod
    def _result(self) -> Any:
        """Return what the object computes."""

    def _mask_of(self, outputs: Any, preds: Any) -> Any:
        """Return the mask of what the object compares, if it heeds one."""
        return None

    def gathered(self) -> GatheredMetric:
        """Return the metric that gathers what the object compares."""
        return GatheredMetric(self._rows, self._computed, self.taken.given.max_bytes)

    def _rows(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        taken, given = self.taken, self.taken.given
        if given.preds is None and not hasattr(outputs, "shape"):
            outputs = logits_of(f"metrics[{taken.name!r}]", outputs)
        preds = outputs if given.preds is None else given.preds(outputs, batch)
        targets = batch.get("targets") if given.targets is None else given.targets(outputs, batch)
        if given.targets is None and not hasattr(targets, "shape"):
            found = "several of them" if "targets" in batch else ", ".join(sorted(batch))
            raise taken.error(
                f"compares the outputs with one array, batch['targets']; the batch has {found}",
                "Give hvdtrain.MetricObject(..., targets=lambda outputs, batch: batch['...']).",
            )
        mask = self._mask_of(outputs, preds)
        return {"preds": preds, "targets": targets, **({} if mask is None else {"mask": mask})}

    def _computed(self, rows: dict[str, Array]) -> Any:
        preds, targets = rows["preds"], rows["targets"]
        if not len(preds):  # a dry run of padding alone
            return float("nan")
        if self._must_not_have is not None and (targets == self._must_not_have).any():
            raise self.taken.error(
                f"is given targets of {self._must_not_have}, which the loss leaves out",
                "Construct it with this number as ignore_index or ignore_class, or leave them out: "
                "write hvdtrain.SumMetric.",
            )
        self._reset()
        # parts do not depend on the number of workers
        size = max(1, _MOST_NUMBERS * len(preds) // max(preds.size, targets.size, 1))
        for first in range(0, len(preds), size):
            part = slice(first, first + size)
            self._update(preds[part], targets[part], rows["mask"][part] if "mask" in rows else None)
        value = self._result()
        return self.taken.given.result(value) if self.taken.given.result else value
