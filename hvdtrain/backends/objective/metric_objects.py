"""Metric objects of torchmetrics and Keras: which are taken, and what they are given."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.logits import class_axis_of, class_axis_option, logits_of, named_loss
from hvdtrain.backends.objective.losses import counting_of, mask_of
from hvdtrain.backends.objective.stateful_metrics import MAX_BYTES
from hvdtrain.data.naming import has_class, type_name
from hvdtrain.errors import TaskError
from hvdtrain.workers.user_errors import where_raised

Array = NDArray[Any]
Function = Callable[[Any, Mapping[str, Any]], Any]

# what makes an object a metric of a framework, by package and class
_BASES = {"torchmetrics.Metric": "torch", "torchmetrics.MetricCollection": "torch", "keras.Metric": "tf"}
# the named losses that take logits, and what makes probabilities of them
_ACTIVATIONS = {"binary_cross_entropy": "sigmoid", "cross_entropy": "softmax"}
# classes, also as base classes, of objects that are no single number of all targets and predictions
_REFUSED = ("torchmetrics.Running", "torchmetrics.BaseAggregator", "torchmetrics.MetricCollection")
_TARGETS_FIRST = {"target": True, "y_true": True, "preds": False, "y_pred": False}
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


def is_metric_object(value: Any) -> bool:
    """Return whether a task's metric is a MetricObject, or an object or class of torchmetrics or Keras."""
    return isinstance(value, MetricObject) or bool(_framework_of(value))


def _framework_of(value: Any) -> str:
    """Return the framework whose library an object, or a class, is a metric of; nothing if it is none."""
    kinds = (value if isinstance(value, type) else type(value)).__mro__
    names = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in kinds]
    return next((framework for base, framework in _BASES.items() if base in names), "")


def _own_object(name: str, given: MetricObject, framework: str) -> Any:
    """Return the object of the job's framework; a function is called for it."""
    found = getattr(given, framework)
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
        library = {"torch": "torchmetrics", "tf": "Keras"}[framework]
        raise TaskError(
            f"metrics[{name!r}] must be an object of {library}, as this job runs --framework {framework}; "
            f"found {'one for the other framework' if found is None else type_name(found)}",
            "Give each framework its own, hvdtrain.MetricObject(torch=..., tf=...): an object, or a function "
            "that makes one. Or give a metric of hvdtrain.",
            everywhere=True,
        )
    return found


class FedObject(ABC):
    """A metric object that is given the rows of all samples, on rank 0 and in the order of the data set."""

    framework: ClassVar[str]
    class_place: ClassVar[int]  # the axis on which the library takes classes
    targets_first: ClassVar[bool]  # in the arguments of the library's updates
    # of each object
    reset: Callable[[], None]
    update: Callable[..., Any]
    result: Callable[[], Any]
    ignored: Container[Any] = ()  # the targets that it leaves out itself
    moves_classes: bool  # whether outputs have an axis of classes that it takes elsewhere
    activation: str  # "sigmoid" or "softmax" if it is given that of the outputs; else empty
    needs_probabilities: bool  # whether other numbers would be wrong, without a word

    def __init__(self, name: str, value: Any, task: Any) -> None:
        self.name, framework = name, self.framework
        is_given = isinstance(value, MetricObject)
        self.given = value if is_given else MetricObject(**{_framework_of(value): value})
        self.metric = metric = _own_object(name, self.given, framework)
        # keras.metrics.Mean and Sum take values; other means compare targets and predictions
        is_of_values = framework == "tf" and "values" in signature(metric.update_state).parameters
        if is_of_values or any(has_class(metric, base) for base in _REFUSED):
            raise self.error(
                "is no single number of the targets and predictions of an evaluation",
                "Give a wrapped metric, or each metric of a collection, by itself. For a mean of values "
                "write a function of (outputs, batch) that returns one value per sample, or "
                "hvdtrain.SumMetric.",
                everywhere=True,
            )
        loss, _ = named_loss(getattr(task, "loss", None), framework)
        self.of_logits = _ACTIVATIONS.get(loss, "") if isinstance(loss, str) else ""
        ignores = bool(self.of_logits) or hasattr(task, "ignore_index")
        self._left_out = counting_of(task, loss).ignore_index if ignores else None
        self._class_axis = class_axis_option(task).get("class_axis")

    def error(self, problem: str, remedy: str, **options: bool) -> TaskError:
        """Return the error of something that the object cannot be used with."""
        problem = f"metrics[{self.name!r}], a {type(self.metric).__name__}, {problem}"
        return TaskError(problem, remedy, **options)

    @abstractmethod
    def probabilities(self, logits: Array) -> Array:
        """Return the activation of logits."""

    @abstractmethod
    def as_arguments(self, preds: Array, targets: Array, mask: Array | None) -> tuple[Any, Any]:
        """Return predictions and targets as tensors, having checked what the library would not refuse."""

    def rows(self, outputs: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the object compares, of a batch."""
        given = self.given
        if given.preds is None and not hasattr(outputs, "shape"):
            outputs = logits_of(f"metrics[{self.name!r}]", outputs)
        preds = outputs if given.preds is None else given.preds(outputs, batch)
        targets = batch.get("targets") if given.targets is None else given.targets(outputs, batch)
        if given.targets is None and not hasattr(targets, "shape"):
            found = "several of them" if "targets" in batch else ", ".join(sorted(batch))
            raise self.error(
                f"compares the outputs with one array, batch['targets']; the batch has {found}",
                "Give hvdtrain.MetricObject(..., targets=lambda outputs, batch: batch['...']).",
            )
        rows, mask = {"preds": preds, "targets": targets}, mask_of(outputs)
        return rows if mask is None or preds.shape[:2] != outputs.shape[:2] else {**rows, "mask": mask}

    def computed(self, rows: dict[str, Array]) -> Any:
        """Return the object's value of all rows."""
        preds, targets = rows["preds"], rows["targets"]
        if not len(preds):  # a dry run of padding alone
            return float("nan")
        left_out = self._left_out
        if left_out is not None and left_out not in self.ignored and (targets == left_out).any():
            raise self.error(
                f"is given targets of {left_out}, which the loss leaves out",
                "Construct it with this number as ignore_index or ignore_class, or leave them out: "
                "write hvdtrain.SumMetric.",
            )
        self.reset()
        first_name = next(iter(signature(self.update).parameters), "")
        targets_first = _TARGETS_FIRST.get(first_name, self.targets_first)
        # parts do not depend on the number of workers
        size = max(1, _MOST_NUMBERS * len(preds) // max(preds.size, targets.size, 1))
        for first in range(0, len(preds), size):
            part = slice(first, first + size)
            mask = rows["mask"][part] if "mask" in rows else None
            pair = self.as_arguments(self._prepared(preds[part], targets[part]), targets[part], mask)
            self.update(*(reversed(pair) if targets_first else pair))
        value = self.result()
        return self.given.result(value) if self.given.result else value

    def _prepared(self, preds: Array, targets: Array) -> Array:
        """Return predictions as the object takes them."""
        is_output = self.given.preds is None and preds.dtype.kind == "f"
        if self.moves_classes and is_output and preds.ndim == targets.ndim + 1:
            shapes = preds.shape, targets.shape
            axis = class_axis_of(f"metrics[{self.name!r}]", *shapes, self._class_axis)
            preds = np.moveaxis(preds, axis, self.class_place)
        if self.activation and is_output:
            preds = self.probabilities(preds)
        if self.needs_probabilities and not ((preds >= 0) & (preds <= 1)).all():
            of_keras = " Or construct it with from_logits=True, if it has that." * (self.framework == "tf")
            raise self.error(
                "takes probabilities, and is given numbers outside of [0, 1]",
                f"Give hvdtrain.MetricObject({self.framework}=..., preds=...): a function of (outputs, "
                f"batch) for probabilities.{of_keras}",
            )
        one, other = ([n for n in array.shape[1:] if n != 1] for array in (preds, targets))
        return preds.reshape(targets.shape) if one == other else preds
