"""Metric objects of torchmetrics and Keras: which are taken, and what they are given."""

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.objective.counting import counting_of
from hvdtrain.backends.objective.logits import class_axis_option, logits_of, named_loss
from hvdtrain.backends.objective.stateful_metrics import Rows, as_number, in_units
from hvdtrain.data.unsupported import has_class, type_name
from hvdtrain.errors import TaskError
from hvdtrain.workers.user_errors import where_raised

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
        "looks at the last batches only, and workers have different ones",
        "Give the metric that it wraps: it is computed of the whole evaluation.",
    ),
    "torchmetrics.BaseAggregator": _OF_VALUES,
}
_TOLERANCE = 1e-3


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


class ObjectState(ABC):
    """An object of another library in an evaluation: each worker updates its own, rank 0 merges their states.

    Args:
        to_numpy: returns a tensor of the framework as an array.
        ignores: the targets that the object leaves out itself.
    """

    def __init__(self, taken: TakenObject, to_numpy: Callable[[Any], Any], ignores: Container[Any]) -> None:
        self.taken = taken
        self._to_numpy = to_numpy
        self._must_not_have = None if taken.ignore_index in ignores else taken.ignore_index
        self._is_checked = False
        self.begin()

    @abstractmethod
    def _reset(self) -> None:
        """Reset the object."""

    @abstractmethod
    def _rows_of(self, tree: Any, is_counted: NDArray[np.bool_]) -> Any:
        """Return outputs or a batch without the samples that do not count."""

    @abstractmethod
    def _update(self, preds: Any, targets: Any, outputs: Any) -> None:
        """Update the object with the samples that count."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return the object's state: arrays, and lists of arrays if it keeps all samples."""

    @abstractmethod
    def _merged(self, states: list[dict[str, Any]], samples: list[int]) -> Any:
        """Return what the object computes of the merged states of workers that have samples, and how many."""

    @abstractmethod
    def _comparable(self, states: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        """Return of merged states, by name, what must not depend on how samples are divided into batches."""

    def begin(self) -> None:
        """Forget all batches."""
        self._reset()
        self._samples = 0

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Add a micro-batch."""
        is_first = not self._samples
        # fewer than three samples prove nothing: their parts are the whole, or equal in size
        if not self._is_checked and rows.is_counted.sum() > (1 if is_first else 2):
            self._check_merges(outputs, batch, rows.is_counted)
        self._add(outputs, batch, rows.is_counted)
        if is_first and self._samples:
            self._check_memory(rows.total)

    def parts(self) -> tuple[int, dict[str, Any]]:
        """Return the state of this worker."""
        return self._samples, self._state() if self._samples else {}

    def compute(self, of_workers: list[tuple[int, dict[str, Any]]]) -> Any:
        """Return the metric's value."""
        of_workers = [(samples, state) for samples, state in of_workers if samples]
        if not of_workers:  # a dry run of padding alone
            return float("nan")
        value = self._merged([state for _, state in of_workers], [samples for samples, _ in of_workers])
        value = self.taken.given.result(value) if self.taken.given.result else value
        return self._to_numpy(value) if hasattr(value, "shape") else value

    def _add(self, outputs: Any, batch: Mapping[str, Any], is_counted: NDArray[np.bool_]) -> None:
        if not is_counted.any():
            return
        taken, given = self.taken, self.taken.given
        if given.preds is None and not hasattr(outputs, "shape"):
            outputs = logits_of(f"metrics[{taken.name!r}]", outputs)
        if not is_counted.all():
            outputs, batch = self._rows_of(outputs, is_counted), self._rows_of(dict(batch), is_counted)
        preds = outputs if given.preds is None else given.preds(outputs, batch)
        targets = batch.get("targets") if given.targets is None else given.targets(outputs, batch)
        if given.targets is None and not hasattr(targets, "shape"):
            found = "several of them" if "targets" in batch else ", ".join(sorted(batch))
            raise taken.error(
                f"compares the outputs with one array, batch['targets']; the batch has {found}",
                "Give hvdtrain.MetricObject(..., targets=lambda outputs, batch: batch['...']).",
            )
        is_array = hasattr(targets, "shape") and self._must_not_have is not None
        if is_array and (self._to_numpy(targets) == self._must_not_have).any():
            raise taken.error(
                f"is given targets of {self._must_not_have}, which the loss leaves out",
                "Construct it with this number as ignore_index or ignore_class, or leave them out: "
                "hvdtrain.MetricObject(..., preds=..., targets=...) may select rows.",
            )
        self._update(preds, targets, outputs)
        self._samples += int(is_counted.sum())

    def _check_merges(self, outputs: Any, batch: Mapping[str, Any], is_counted: NDArray[np.bool_]) -> None:
        """Check that the object has the same state and value for a batch and for its two parts."""
        places = np.flatnonzero(is_counted)
        first, rest = np.split(places, [max(1, len(places) // 3)])  # unequal, for means of means
        probe = type(self)(self.taken)  # type: ignore[call-arg]  # the frameworks' classes take no more

        def updated(*batches: NDArray[np.intp]) -> tuple[int, dict[str, Any]]:
            probe.begin()
            for chosen in batches:
                probe._add(outputs, batch, np.isin(np.arange(len(is_counted)), chosen))
            return probe.parts()

        # the whole before the parts: what the object keeps in addition to its state is to differ
        whole = [updated(places)]
        value = probe._value(whole)
        try:
            # on two workers, and as two batches on one
            ways = [[updated(first), updated(rest)], [updated(first, rest)]]
            states, of_first, *others = (
                probe._comparable([state for _, state in way]) for way in (whole, ways[0][:1], *ways)
            )
        except Exception:  # it does not take so few samples
            return
        values = [probe._value(way) for way in ways]
        is_number = bool(np.isfinite([value, *values]).all())
        problems = [
            f"its state {key!r} after a batch is not that after the same batch in two parts"
            for other in others
            for key, state in states.items()
            if not _is_close(state, other[key], of_first[key])
        ] + [
            f"it gives {value:.6g} for a batch, and {other:.6g} for the same batch in two parts"
            for other in values
            if is_number and not np.isclose(value, other, _TOLERANCE, 1e-6)
        ]
        if problems:
            raise self.taken.error(
                f"cannot be added up over workers: {problems[0]}",
                "Use an object whose states are sums, maxima or concatenated rows, or write "
                "hvdtrain.SumMetric or hvdtrain.GatheredMetric.",
            )
        self._is_checked = is_number and len(places) > 2

    def _value(self, of_workers: list[tuple[int, dict[str, Any]]]) -> float:
        """Return what is computed of states; NaN if that fails, which the evaluation reports."""
        try:
            number = as_number(self.compute(of_workers))
        except Exception:
            number = None
        return float("nan") if number is None else number

    def _check_memory(self, total: int) -> None:
        lists = [value for value in self._state().values() if isinstance(value, list)]
        needed = sum(array.nbytes for value in lists for array in value) // self._samples * total
        if needed > self.taken.given.max_bytes:
            raise self.taken.error(
                f"would keep {in_units(needed)} on rank 0: all {total:,} samples of the evaluation set; it "
                f"may take {in_units(self.taken.given.max_bytes)}",
                "Give it bins, such as thresholds=200, if it takes them; or, if rank 0 has the memory, "
                "hvdtrain.MetricObject(..., max_bytes=...).",
            )


def _is_close(whole: NDArray[Any], merged: NDArray[Any], first: NDArray[Any]) -> bool:
    """Return whether a state is that of the parts but for rounding, which also depends on the first part."""
    if whole.shape != merged.shape or whole.dtype.kind not in "fiub":
        return whole.shape == merged.shape
    known = np.concatenate([np.abs(array, dtype=np.float64).ravel() for array in (whole, first)])
    scale = np.max(known, initial=0.0, where=np.isfinite(known))
    return np.allclose(whole, merged, _TOLERANCE, max(1e-6, 1e-4 * scale), equal_nan=True)
