"""Metric objects of torchmetrics and Keras: which are taken, and what they are given."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from hvdtrain.backends.objective.counting import counting_of
from hvdtrain.backends.objective.logits import class_axis_option, named_loss
from hvdtrain.backends.objective.stateful_metrics import as_number
from hvdtrain.data.unsupported import has_class, type_name
from hvdtrain.errors import TaskError
from hvdtrain.workers.user_errors import where_raised

Function = Callable[[Any, Mapping[str, Any]], Any]

_LIBRARIES = {"torch": "torchmetrics", "tf": "Keras"}
# what makes an object a metric of a framework, by package and class
_BASES = {
    "torchmetrics.Metric": "torch",
    "torchmetrics.MetricCollection": "torch",
    "torchmetrics.MetricTracker": "torch",
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
    "torchmetrics.MetricTracker": (
        "keeps a history over evaluations, which hvdtrain logs itself",
        "Give the metric that it wraps; --keep-best finds the best evaluation.",
    ),
    "torchmetrics.MinMaxMetric": (
        "keeps a history over evaluations, which hvdtrain logs itself",
        "Give the metric that it wraps; --keep-best finds the best evaluation.",
    ),
    "torchmetrics.Running": (
        "looks at the last batches only, and workers have different ones",
        "Give the metric that it wraps: it is computed of the whole evaluation.",
    ),
    "torchmetrics.BootStrapper": (
        "draws samples at random within each batch, so it depends on how workers share the data",
        "Write hvdtrain.GatheredMetric and draw from all samples.",
    ),
    "torchmetrics.BaseAggregator": _OF_VALUES,
}


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
        max_bytes: what the state of an object that keeps all samples may take on rank 0.
    """

    torch: Any = None
    tf: Any = None
    preds: Function | None = None
    targets: Function | None = None
    result: Callable[[Any], Any] | None = None
    max_bytes: int = 1 << 30


@dataclass(frozen=True)
class TakenObject:
    """One metric object of a task, with all that is to be known of it.

    Attributes:
        name: what it is logged as.
        metric: the object, of the job's framework.
        given: what it is given in place of outputs and targets.
        activation: "sigmoid" or "softmax" if outputs are logits, which makes probabilities of them.
        ignore_index: the target that the loss leaves out; None if it leaves out none.
        class_axis: the task's ``class_axis``, or None.
    """

    name: str
    metric: Any
    given: MetricObject
    activation: str = ""
    ignore_index: int | None = None
    class_axis: int | None = None

    def error(self, problem: str, remedy: str) -> TaskError:
        """Return the error of something that the object cannot be used with."""
        return _error(self.name, self.metric, problem, remedy, everywhere=False)

    def number(self, value: Any) -> float:
        """Return what the object computed, which must be one number.

        Raises:
            TaskError: If it is several, or none.
        """
        if (number := as_number(value)) is None:
            shape = getattr(value, "shape", None)
            found = f"a {type(value).__name__}" if shape is None else f"numbers of shape {shape}"
            if isinstance(value, Mapping):
                found += f" of {', '.join(map(str, value))}"
            raise self.error(
                f"computes {found}; a metric is one number",
                "Let it average, such as average='macro', or choose one: hvdtrain.MetricObject(..., "
                "result=lambda value: value[0]). Of several numbers, give each an entry of metrics.",
            )
        return number


def is_metric_object(value: Any) -> bool:
    """Return whether a task's metric is a MetricObject, or an object or class of torchmetrics or Keras."""
    return isinstance(value, MetricObject) or bool(_framework_of(value)) or bool(_framework_of_class(value))


def logged_names(metrics: Any, task: Any, framework: str) -> list[str]:
    """Return what a task's metrics are logged as: their names, and those of a collection's members.

    Raises:
        TaskError: If an object cannot be used.
    """
    if not isinstance(metrics, Mapping):
        return []  # which is refused when the model is built
    names: list[str] = []
    for name, value in metrics.items():
        taken = taken_objects(name, value, task, framework) if is_metric_object(value) else []
        names += [one.name for one in taken] or [name]
    return names


def taken_objects(name: str, value: Any, task: Any, framework: str) -> list[TakenObject]:
    """Return the objects of a task's metric: one, or those of a collection.

    Args:
        name: the metric's.
        value: what ``is_metric_object`` says yes to.
        task: the task, whose loss says what the outputs are.
        framework: "torch" or "tf".

    Raises:
        TaskError: If the object is one of the other framework, or cannot be used.
    """
    of = _framework_of(value) or _framework_of_class(value)
    given = value if isinstance(value, MetricObject) else MetricObject(**{of or framework: value})
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
    for member, one in members.items():
        _check_taken(member, one)
    return [TakenObject(key, one, given, activation, ignored, class_axis) for key, one in members.items()]


def _own_object(name: str, given: MetricObject, framework: str) -> Any:
    """Return the object of the job's framework; a function is called for it.

    Raises:
        TaskError: If there is none.
    """
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
    if not _framework_of(found) and callable(found):
        found = _made(name, found)
    if _framework_of(found) != framework:
        raise TaskError(
            f"metrics[{name!r}] must be an object of {library} if the job runs --framework {framework}; "
            f"found a {type_name(found)}",
            "Give each framework its own: hvdtrain.MetricObject(torch=..., tf=...).",
            everywhere=True,
        )
    return found


def _made(name: str, make: Callable[[], Any]) -> Any:
    """Return the object that a class, or a function without arguments, makes."""
    try:
        return make()
    except Exception as error:
        raise TaskError(
            f"metrics[{name!r}] cannot be constructed: {where_raised(error, own_only=True)}",
            "Correct the function; it is called without arguments, on every worker."
            if _takes_no_arguments(make)
            else "Give an object, or a function without arguments that makes one.",
            everywhere=True,
        ) from error


def _takes_no_arguments(make: Callable[..., Any]) -> bool:
    """Return whether something can be called without arguments, as far as that is known."""
    try:
        inspect.signature(make).bind()
    except (TypeError, ValueError):
        return False
    return True


def _check_taken(name: str, metric: Any) -> None:
    """Check that an object is none of those whose numbers would be wrong."""
    reason = next((why for base, why in _REFUSED.items() if has_class(metric, base)), None)
    if reason is None and _framework_of(metric) == "tf" and "values" in _parameters(metric.update_state):
        reason = _OF_VALUES  # keras.metrics.Mean and Sum; other means compare targets and predictions
    if reason:
        raise _error(name, metric, *reason, everywhere=True)


def _error(name: str, metric: Any, problem: str, remedy: str, everywhere: bool) -> TaskError:
    return TaskError(
        f"metrics[{name!r}], a {type(metric).__name__}, {problem}", remedy, everywhere=everywhere
    )


def targets_of(taken: TakenObject, outputs: Any, batch: Mapping[str, Any]) -> Any:
    """Return the targets that an object is given.

    Raises:
        TaskError: If the batch has none.
    """
    if taken.given.targets is not None:
        return taken.given.targets(outputs, batch)
    if "targets" not in batch or isinstance(batch["targets"], Mapping | tuple):
        found = "several of them" if "targets" in batch else ", ".join(sorted(batch))
        raise taken.error(
            f"compares the outputs with one array, batch['targets']; the batch has {found}",
            "Give hvdtrain.MetricObject(..., targets=lambda outputs, batch: batch['...']).",
        )
    return batch["targets"]


def in_call_order(
    update: Callable[..., Any], preds: Any, targets: Any, targets_first: bool
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of an object's update, by position and by name.

    Args:
        update: the object's own update.
        preds: what is compared with the targets.
        targets: the targets.
        targets_first: their order if the names of its arguments do not tell.
    """
    names = _parameters(update)
    for of_preds, of_targets in (("preds", "target"), ("y_pred", "y_true")):
        if of_preds in names and of_targets in names:
            return (), {of_preds: preds, of_targets: targets}
    return ((targets, preds) if targets_first else (preds, targets)), {}


def is_same_but_units(preds: tuple[int, ...], targets: tuple[int, ...]) -> bool:
    """Return whether shapes differ by axes of length 1 only."""
    return [n for n in preds[1:] if n != 1] == [n for n in targets[1:] if n != 1] and preds[:1] == targets[:1]


def _parameters(function: Callable[..., Any]) -> list[str]:
    try:
        return list(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return []


def _framework_of(value: Any) -> str:
    """Return the framework whose library an object is a metric of; nothing if it is none."""
    return next((framework for base, framework in _BASES.items() if has_class(value, base)), "")


def _framework_of_class(value: Any) -> str:
    """Likewise of a class."""
    if not isinstance(value, type):
        return ""
    names = [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in value.__mro__]
    return next((framework for base, framework in _BASES.items() if base in names), "")
