"""Objects of torchmetrics in an evaluation; as in ``tensorflow/objective/metric_objects.py``."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective.evaluation_metrics import check_bytes, check_merges
from hvdtrain.backends.objective.logits import class_axis_of, logits_of
from hvdtrain.backends.objective.metric_objects import (
    TakenObject,
    in_call_order,
    is_same_but_units,
    taken_objects,
    targets_of,
)
from hvdtrain.backends.objective.stateful_metrics import Part, Rows, StatefulMetric
from hvdtrain.data.unsupported import has_class

# classes of torchmetrics that look at every batch by itself whether all of it lies in [0, 1], and take it for
# logits if it does not: by how their names begin, or by name
_OF_NUMBERS = ("Binary", "Multilabel")
_OF_PROBABILITIES = ("MulticlassPrecisionRecallCurve", "MulticlassCalibrationError", "MulticlassHingeLoss")


class ObjectInputs:
    """Makes the arguments of an object's update of a model's outputs and a batch.

    Args:
        taken: the object, and what it is given.
        metric: the copy of the object that is updated.
    """

    def __init__(self, taken: TakenObject, metric: Any) -> None:
        self._taken, self._metric = taken, metric
        within = [module for _, module in metrics_within(metric)]
        names = [name for module in within for name in _classification_names(module)]
        self._takes_classes = bool(names)
        self._has_class_axis = any(name.startswith("Multiclass") for name in names)
        # what torchmetrics applies to the batches that it takes for logits
        self._guessed = ""
        if any(name.startswith(_OF_NUMBERS) for name in names):
            self._guessed = "sigmoid"
        elif any(name in _OF_PROBABILITIES for name in names):
            self._guessed = "softmax"
        ignored = [getattr(module, "ignore_index", None) for module in within]
        self._must_not_have = None if taken.ignore_index in ignored else taken.ignore_index

    def __call__(
        self, outputs: Any, batch: Mapping[str, Any], is_counted: NDArray[np.bool_]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments, by position and by name, of the samples that count.

        Raises:
            TaskError: If they would give wrong numbers.
        """
        given = self._taken.given
        if given.preds is None and not isinstance(outputs, Tensor):
            outputs = logits_of(f"metrics[{self._taken.name!r}]", outputs)
        if not is_counted.all():
            outputs, batch = _rows_of(outputs, is_counted), _rows_of(dict(batch), is_counted)
        preds = outputs if given.preds is None else given.preds(outputs, batch)
        targets = targets_of(self._taken, outputs, batch)
        if not isinstance(preds, Tensor) or not isinstance(targets, Tensor):
            return in_call_order(self._metric.update, preds, targets, targets_first=False)
        if self._takes_classes:
            preds, targets = self._of_classes(preds, targets)
        if preds.shape != targets.shape and is_same_but_units(tuple(preds.shape), tuple(targets.shape)):
            preds = preds.reshape(targets.shape)
        if self._must_not_have is not None and bool((targets == self._must_not_have).any()):
            raise self._taken.error(
                f"is given targets of {self._must_not_have}, which the loss leaves out",
                f"Construct it with ignore_index={self._must_not_have}, or leave them out: "
                "hvdtrain.MetricObject(torch=..., preds=..., targets=...) may select rows.",
            )
        return in_call_order(self._metric.update, preds, targets, targets_first=False)

    def _of_classes(self, preds: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what metrics of classes take: classes on axis 1, probabilities, and integers as targets."""
        taken = self._taken
        if targets.is_floating_point() and bool((targets == targets.round()).all()):
            targets = targets.long()
        if not preds.is_floating_point():
            return preds, targets
        if self._has_class_axis and taken.given.preds is None and preds.dim() == targets.dim() + 1:
            axis = class_axis_of(
                f"metrics[{taken.name!r}]", tuple(preds.shape), tuple(targets.shape), taken.class_axis
            )
            preds = preds.movedim(axis, 1)
        if self._guessed and taken.given.preds is None and taken.activation:
            preds = preds.sigmoid() if self._guessed == "sigmoid" else preds.softmax(1)
        elif self._guessed and not bool(((preds >= 0) & (preds <= 1)).all()):
            raise taken.error(
                "is given numbers outside of [0, 1]. torchmetrics takes a batch for logits if it has such "
                "numbers and for probabilities if not, so the value would depend on the batches",
                f"Give probabilities: hvdtrain.MetricObject(torch=..., preds=lambda outputs, batch: "
                f"outputs.{'sigmoid()' if self._guessed == 'sigmoid' else 'softmax(1)'}).",
            )
        return preds, targets


def metrics_within(metric: Any) -> Iterator[tuple[str, Any]]:
    """Yield an object of torchmetrics and those that it consists of, with their paths."""
    for path, module in metric.named_modules():
        if has_class(module, "torchmetrics.Metric"):
            yield path, module


def _classification_names(metric: Any) -> list[str]:
    """Return the names of an object's classes that are torchmetrics' own for classification."""
    kinds = type(metric).__mro__
    return [kind.__name__ for kind in kinds if kind.__module__.startswith("torchmetrics.classification")]


def _rows_of(tree: Any, is_counted: NDArray[np.bool_]) -> Any:
    """Return outputs or a batch without the samples that do not count."""
    places = np.flatnonzero(is_counted)

    def rows(tensor: Tensor) -> Tensor:
        if tensor.shape[:1] != (len(is_counted),):
            return tensor
        return tensor[torch.from_numpy(places).to(tensor.device)]

    return pytree.tree_map_only(Tensor, rows, tree)


# torchmetrics' reductions, which are functions, by name; of others, the workers' states are kept side by side
_REDUCTIONS = {"dim_zero_sum": "sum", "dim_zero_max": "max", "dim_zero_min": "min", "dim_zero_mean": "mean"}
_APART: Mapping[str, Literal["max", "min"]] = {"max": "max", "min": "min"}
# keys of the state that no object has: how many samples a worker had, and the shapes of a list's tensors
_SAMPLES, _SHAPES = "samples of a worker", " shapes"


def object_states(name: str, value: Any, task: Any) -> dict[str, StatefulMetric]:
    """Return the states of a task's metric that is an object: one, or those of a collection.

    Args:
        name: the metric's.
        value: what ``is_metric_object`` says yes to.
        task: the task.

    Raises:
        TaskError: If the object cannot be used.
    """
    return {taken.name: ObjectState(taken) for taken in taken_objects(name, value, task, "torch")}


class ObjectState:
    """An object of torchmetrics in an evaluation.

    After each update its sums and lists are moved from the object to arrays of this class: sums are added up
    in float64, and rows are put in the order of the data set.

    Args:
        taken: the object.

    Raises:
        TaskError: If the object has no states.
    """

    def __init__(self, taken: TakenObject) -> None:
        self._taken = taken
        self._metric = taken.metric.clone()
        # (key, the object or one within it, name of the state)
        self._states = [
            (f"{path}.{name}" if path else name, module, name)
            for path, module in metrics_within(self._metric)
            for name in module._defaults
        ]
        if not self._states:
            raise taken.error(
                "has no state that torchmetrics knows of, so the workers' cannot be merged",
                "Call self.add_state() in its __init__ for whatever update() changes.",
            )
        for _, module in metrics_within(self._metric):
            module._to_sync = module.sync_on_compute = module.dist_sync_on_step = False
            module.compute_with_cache = False
        self._inputs = ObjectInputs(taken, self._metric)
        # of lists: an empty array of what they hold, as the first batch has it
        self._empty: dict[str, NDArray[Any]] | None = None
        # of other states: the shape, which some objects find in the first batch
        self._shapes: dict[str, tuple[int, ...]] = {}
        self.begin()

    def begin(self) -> None:
        """Forget all batches."""
        self._metric.reset()
        for _, module in metrics_within(self._metric):
            module.reset()
        self._sums: dict[str, Tensor] = {}
        self._items: dict[str, list[tuple[int, NDArray[Any]]]] = {}
        self._samples = 0
        self._has_checked_bytes = False

    def add(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Add a micro-batch."""
        with torch.no_grad():
            if self._empty is None:
                self._check(outputs, batch, rows)
            self._update(outputs, batch, rows)
            if not self._has_checked_bytes and rows.is_counted.any():  # each evaluation set has its size
                check_bytes(self._taken, self.parts(), rows)
                self._has_checked_bytes = True

    def parts(self) -> Mapping[str, Part]:
        """Return the state of this worker."""
        found = {_SAMPLES: Part(np.asarray(self._samples), "stack")}
        for key, module, name in self._states:
            reduction = _reduction(module, name)
            if isinstance(module._defaults[name], list):
                found |= self._parts_of_list(key, is_kept_apart=reduction != "dim_zero_cat")
            elif reduction == "sum":
                total = self._sums.get(key, torch.zeros_like(module._defaults[name]))
                found[key] = Part(self._shaped(key, _to_numpy(total)), "sum")
            else:
                value = self._shaped(key, _to_numpy(getattr(module, name)))
                found[key] = Part(value, _APART.get(reduction, "stack"))
        return found

    def compute(self, merged: dict[str, NDArray[Any]]) -> Any:
        """Return the metric's value."""
        with torch.no_grad():
            for _, module in metrics_within(self._metric):
                module._update_count = 1
            samples = merged[_SAMPLES].reshape(-1)
            for key, module, name in self._states:
                setattr(module, name, self._merged(key, module, name, merged, samples))
            value = self._metric.compute()
            number = self._taken.given.result(value) if self._taken.given.result else value
        return self._taken.number(number.cpu().numpy() if isinstance(number, Tensor) else number)

    def _shaped(self, key: str, value: NDArray[Any]) -> NDArray[Any]:
        """Return a state; of a worker without samples, in the shape that the others' have."""
        shape = value.shape if self._samples else self._shapes.get(key, value.shape)
        return np.broadcast_to(value, shape).copy()

    def _check(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Learn from the first batch what the lists hold, and check what will be computed."""

        def state_of(some: Rows) -> Mapping[str, Part]:
            self.begin()
            self._update(outputs, batch, some)
            return self.parts()

        self._metric.to(next(one.device for one in pytree.tree_leaves(outputs) if isinstance(one, Tensor)))
        self._empty = {}
        sample = rows if rows.is_counted.any() else rows._replace(is_counted=np.ones_like(rows.is_counted))
        first = state_of(sample)
        self._empty = {key: part.array[:0] for key, part in first.items() if part.reduction == "gather"}
        self._shapes = {key: part.array.shape for key, part in first.items() if part.reduction != "gather"}
        try:
            check_merges(self._taken, rows, state_of, self.compute)
        finally:
            self.begin()

    def _update(self, outputs: Any, batch: Mapping[str, Any], rows: Rows) -> None:
        """Update the object with the rows that count, and take its sums and lists out of it."""
        if not rows.is_counted.any():
            return
        arguments, named = self._inputs(outputs, batch, rows.is_counted)
        self._metric.update(*arguments, **named)
        self._samples += int(rows.is_counted.sum())
        first = int(rows.indices[rows.is_counted].min())
        for key, module, name in self._states:
            value, default = getattr(module, name), module._defaults[name]
            if isinstance(default, list):
                items = value if isinstance(value, Sequence) else [value]
                self._items.setdefault(key, []).extend((first, self._row(key, item)) for item in items)
                setattr(module, name, [])
            elif _reduction(module, name) == "sum":
                added = _wide(value) - _wide(default.to(value.device))
                self._sums[key] = self._sums[key] + added if key in self._sums else added
                setattr(module, name, default.detach().clone().to(value.device))

    def _row(self, key: str, item: Any) -> NDArray[Any]:
        if not isinstance(item, Tensor):
            raise self._taken.error(
                f"keeps a list of {type(item).__name__} in its state {key!r}",
                "Only lists of tensors can be gathered: write hvdtrain.GatheredMetric.",
            )
        return _to_numpy(item)

    def _parts_of_list(self, key: str, is_kept_apart: bool) -> dict[str, Part]:
        """Return the rows of a list's tensors; with their shapes, if they must stay apart."""
        assert self._empty is not None
        found = sorted(self._items.get(key, []), key=lambda item: item[0])
        firsts = [first for first, _ in found]
        items = [array.reshape(-1) if is_kept_apart or not array.ndim else array for _, array in found]
        rows = np.concatenate(items) if items else self._empty.get(key, np.empty(0, np.float32))
        parts = {key: Part(rows, "gather", np.repeat(firsts, [len(item) for item in items]).astype(np.int64))}
        if is_kept_apart:
            shapes = np.asarray([array.shape for _, array in found], np.int64) if found else None
            shapes = self._empty.get(key + _SHAPES, np.empty((0, 1), np.int64)) if shapes is None else shapes
            parts[key + _SHAPES] = Part(shapes, "gather", np.asarray(firsts, np.int64))
        return parts

    def _merged(
        self, key: str, module: Any, name: str, merged: Mapping[str, NDArray[Any]], samples: NDArray[Any]
    ) -> Any:
        """Return the value of a state of the object, of the merged state."""
        default, reduction = module._defaults[name], _reduction(module, name)
        value = merged[key]
        if isinstance(default, list):
            return self._merged_list(value, merged.get(key + _SHAPES))
        if reduction == "sum":
            wide = _wide(default).cpu().numpy() + value
            wide = np.rint(wide) if not default.is_floating_point() else wide
            return self._tensor(wide).to(default.dtype)
        if reduction in ("max", "min"):
            return self._tensor(value)
        with_samples = samples > 0  # a worker without samples has nothing to say
        of_workers, counts = value[with_samples], samples[with_samples]
        if len(of_workers) == 1:
            return self._tensor(of_workers[0])
        return self._reduced(module._reductions[name], reduction, of_workers, counts, default)

    def _reduced(
        self, reduce: Any, reduction: str, of_workers: NDArray[Any], counts: NDArray[Any], default: Tensor
    ) -> Tensor:
        """Return what the states of several workers become."""
        if reduction == "mean":
            return self._tensor(np.average(of_workers, axis=0, weights=counts)).to(default.dtype)
        stacked = self._tensor(of_workers)
        reduced: Tensor = stacked if reduce is None else reduce(stacked)
        return reduced

    def _merged_list(self, rows: NDArray[Any], shapes: NDArray[Any] | None) -> list[Tensor]:
        """Return the tensors of a list: one of all rows, or one of each shape."""
        if shapes is None:
            return [self._tensor(rows)] if len(rows) else []
        ends = np.cumsum(shapes.prod(1))
        starts = ends - shapes.prod(1)
        return [
            self._tensor(rows[start:end].reshape(shape))
            for start, end, shape in zip(starts, ends, shapes, strict=True)
        ]

    def _tensor(self, array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(array)).to(self._metric.device)


def _reduction(module: Any, name: str) -> str:
    """Return the name of a state's reduction, "custom" if it is a function of the object's own."""
    reduce = module._reductions[name]
    if reduce is None:
        return "none"
    own = reduce.__module__.partition(".")[0] == "torchmetrics"
    found = reduce.__name__ if own else "custom"
    return _REDUCTIONS.get(found, found)


def _wide(value: Tensor) -> Tensor:
    return value.double() if value.is_floating_point() else value.long()


def _to_numpy(tensor: Tensor) -> NDArray[Any]:
    tensor = tensor.detach().cpu()
    return (tensor.float() if tensor.dtype is torch.bfloat16 else tensor).numpy().copy()
