"""Objects of torchmetrics in an evaluation, and what else it needs; as in ``tensorflow/``."""

from collections.abc import Iterator
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective import metric_objects as shared
from hvdtrain.backends.objective.logits import class_axis_of
from hvdtrain.backends.objective.metric_objects import TakenObject, in_call_order, is_same_but_units
from hvdtrain.backends.objective.named_metrics import MetricFunctions
from hvdtrain.backends.objective.stateful_metrics import Collectives, StatefulMetric
from hvdtrain.backends.torch.objective.losses import classes_last, cross_entropy
from hvdtrain.backends.torch.program import to_numpy
from hvdtrain.data.unsupported import has_class

# classes of torchmetrics that look at every batch by itself whether all of it lies in [0, 1], and take it for
# logits if it does not: by how their names begin, or by name
_OF_NUMBERS = ("Binary", "Multilabel")
_OF_PROBABILITIES = ("MulticlassPrecisionRecallCurve", "MulticlassCalibrationError", "MulticlassHingeLoss")
# torchmetrics' reductions of which the state of a batch is that of its parts
_COMPARABLE = ("dim_zero_sum", "dim_zero_max", "dim_zero_min")


def as_array(value: Any) -> NDArray[Any]:
    """Return what an update gave as an array: a tensor on any device, or what numpy takes."""
    return to_numpy(value.detach().cpu()) if isinstance(value, Tensor) else np.asarray(value)


def object_states(name: str, value: Any, task: Any) -> dict[str, StatefulMetric]:
    """Return the states of a task's metric that is an object: one, or those of a collection."""
    return {taken.name: ObjectState(taken) for taken in shared.taken_objects(name, value, task, "torch")}


class ObjectState(shared.ObjectState):
    """An object of torchmetrics in an evaluation, whose states are merged as its reductions say."""

    def __init__(self, taken: TakenObject) -> None:
        self._metric = taken.metric.clone()
        modules = self._metric.named_modules()
        self._within = {path: one for path, one in modules if has_class(one, "torchmetrics.Metric")}
        if not any(module._defaults for module in self._within.values()):
            raise taken.error(
                "has no state that torchmetrics knows of, so the workers' cannot be merged",
                "Call self.add_state() in its __init__ for whatever update() changes.",
            )
        for module in self._within.values():
            module._to_sync = module.sync_on_compute = module.dist_sync_on_step = False
            module.compute_with_cache = False
        names = [
            kind.__name__
            for module in self._within.values()
            for kind in type(module).__mro__
            if kind.__module__.startswith("torchmetrics.classification")
        ]
        self._takes_classes = bool(names)
        self._has_class_axis = any(name.startswith("Multiclass") for name in names)
        # what torchmetrics applies to the batches that it takes for logits
        self._guessed = ""
        if any(name.startswith(_OF_NUMBERS) for name in names):
            self._guessed = "sigmoid"
        elif any(name in _OF_PROBABILITIES for name in names):
            self._guessed = "softmax"
        ignores = [getattr(module, "ignore_index", None) for module in self._within.values()]
        super().__init__(taken, as_array, ignores)

    def _reset(self) -> None:
        for module in self._within.values():
            module.reset()

    def _rows_of(self, tree: Any, is_counted: NDArray[np.bool_]) -> Any:
        places = torch.from_numpy(np.flatnonzero(is_counted))

        def rows(tensor: Tensor) -> Tensor:
            has_rows = tensor.shape[:1] == (len(is_counted),)
            return tensor[places.to(tensor.device)] if has_rows else tensor

        return pytree.tree_map_only(Tensor, rows, tree)

    @torch.no_grad()
    def _update(self, preds: Any, targets: Any, outputs: Any) -> None:
        if isinstance(preds, Tensor) and isinstance(targets, Tensor):
            self._metric.to(preds.device)
            if self._takes_classes:
                preds, targets = self._of_classes(preds, targets)
            if is_same_but_units(preds, targets):
                preds = preds.reshape(targets.shape)
        in_call_order(self._metric.update, preds, targets, targets_first=False)

    def _of_classes(self, preds: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what metrics of classes take: classes on axis 1, probabilities, and integers as targets."""
        taken = self.taken
        if targets.is_floating_point() and bool((targets == targets.round()).all()):
            targets = targets.long()
        if not preds.is_floating_point():
            return preds, targets
        is_output = taken.given.preds is None
        if self._has_class_axis and is_output and preds.dim() == targets.dim() + 1:
            shapes = tuple(preds.shape), tuple(targets.shape)
            preds = preds.movedim(class_axis_of(f"metrics[{taken.name!r}]", *shapes, taken.class_axis), 1)
        if self._guessed and is_output and taken.activation:
            preds = preds.sigmoid() if self._guessed == "sigmoid" else preds.softmax(1)
        elif self._guessed and not bool(((preds >= 0) & (preds <= 1)).all()):
            raise taken.error(
                "is given numbers outside of [0, 1]. torchmetrics takes a batch for logits if it has such "
                "numbers and for probabilities if not, so the value would depend on the batches",
                f"Give probabilities: hvdtrain.MetricObject(torch=..., preds=lambda outputs, batch: "
                f"outputs.{'sigmoid()' if self._guessed == 'sigmoid' else 'softmax(1)'}).",
            )
        return preds, targets

    def _state(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for path, module in self._within.items():
            for name in module._defaults:
                value = getattr(module, name)
                is_list = isinstance(value, list)
                if not all(isinstance(item, Tensor) for item in (value if is_list else [value])):
                    raise self.taken.error(
                        f"keeps something else than tensors in its state {name!r}",
                        "Only tensors can be gathered: write hvdtrain.GatheredMetric.",
                    )
                found[f"{path}.{name}"] = [as_array(item) for item in value] if is_list else as_array(value)
        return found

    @torch.no_grad()
    def _merged(self, states: list[dict[str, Any]], samples: list[int]) -> Any:
        for path, name, _, value in self._reduced(states, samples):
            setattr(self._within[path], name, value)
        for module in self._within.values():
            module._update_count = 1
        return self._metric.compute()

    @torch.no_grad()
    def _comparable(self, states: list[dict[str, Any]]) -> dict[str, NDArray[Any]]:
        found = {}
        for path, name, reduction, value in self._reduced(states, [1] * len(states)):
            if isinstance(value, list) and reduction == "dim_zero_cat":
                rows = [np.atleast_1d(as_array(item)) for item in value]
                found[f"{path}.{name}".lstrip(".")] = np.concatenate(rows or [np.empty(0)])
            elif not isinstance(value, list) and reduction in _COMPARABLE:
                found[f"{path}.{name}".lstrip(".")] = as_array(value)
        return found

    def _reduced(
        self, states: list[dict[str, Any]], samples: list[int]
    ) -> Iterator[tuple[str, str, str, Tensor | list[Tensor]]]:
        """Yield an object's path, a state's name, its reduction's name, and what workers' states become."""

        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.array(array)).to(self._metric.device)

        for path, module in self._within.items():
            for name, reduce in module._reductions.items():
                values = [state[f"{path}.{name}"] for state in states]
                reduction = getattr(reduce, "__name__", "")
                value: Tensor | list[Tensor]
                if isinstance(values[0], list):  # as in one process
                    value = [tensor(item) for items in values for item in items]
                elif len(values) == 1:
                    value = tensor(values[0])
                elif reduction == "dim_zero_mean":  # torchmetrics' own has no weights
                    value = tensor(np.average(values, axis=0, weights=samples).astype(values[0].dtype))
                else:
                    of_workers = torch.stack([tensor(array) for array in values])
                    value = of_workers if reduce is None else reduce(of_workers)
                yield path, name, reduction, value


class HorovodCollectives(Collectives):
    """How objects, as bytes, and the states of metrics move between workers."""

    hvd = hvd
    to_tensor = staticmethod(torch.from_numpy)

    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for: Horovod keeps those."""
        return bool(mpi_ops._handle_map)


FUNCTIONS = MetricFunctions(
    "torch",
    as_array,
    object_states,
    cross_entropy,
    classes_last,
    argmax=lambda outputs: outputs.argmax(-1),
    mask_of=lambda outputs: None,
)
