"""Objects of torchmetrics in an evaluation; as in ``tensorflow/objective/metric_objects.py``."""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective import metric_objects as shared
from hvdtrain.backends.objective.logits import class_axis_of
from hvdtrain.backends.objective.metric_objects import TakenObject, in_call_order, is_same_but_units
from hvdtrain.backends.objective.stateful_metrics import StatefulMetric
from hvdtrain.backends.torch.program import to_numpy
from hvdtrain.data.unsupported import has_class

# classes of torchmetrics that look at every batch by itself whether all of it lies in [0, 1], and take it for
# logits if it does not: by how their names begin, or by name
_OF_NUMBERS = ("Binary", "Multilabel")
_OF_PROBABILITIES = ("MulticlassPrecisionRecallCurve", "MulticlassCalibrationError", "MulticlassHingeLoss")


def as_array(value: Any) -> NDArray[Any]:
    """Return what an update gave as an array: a tensor on any device, or what numpy takes."""
    return to_numpy(value.detach().cpu()) if isinstance(value, Tensor) else np.asarray(value)


def object_states(name: str, value: Any, task: Any) -> dict[str, StatefulMetric]:
    """Return the states of a task's metric that is an object: one, or those of a collection.

    Raises:
        TaskError: If the object cannot be used.
    """
    return {taken.name: ObjectState(taken) for taken in shared.taken_objects(name, value, task, "torch")}


class ObjectState(shared.ObjectState):
    """An object of torchmetrics in an evaluation, whose states are merged as its reductions say.

    Raises:
        TaskError: If the object has no states.
    """

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
    def _merged(self, states: list[dict[str, Any]]) -> Any:
        def tensor(array: NDArray[Any]) -> Tensor:
            return torch.from_numpy(np.array(array)).to(self._metric.device)

        for path, module in self._within.items():
            module._update_count = 1
            for name, reduce in module._reductions.items():
                values = [state[f"{path}.{name}"] for state in states]
                if isinstance(values[0], list):  # as in one process
                    setattr(module, name, [tensor(item) for items in values for item in items])
                    continue
                of_workers = torch.stack([tensor(array) for array in values])
                value = of_workers if reduce is None else reduce(of_workers)
                setattr(module, name, of_workers[0] if len(values) == 1 else value)
        return self._metric.compute()
