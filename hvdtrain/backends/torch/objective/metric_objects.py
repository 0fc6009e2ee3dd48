"""Objects of torchmetrics in an evaluation, and what else it needs; as in ``tensorflow/``."""

from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.backends.objective import metric_objects as shared
from hvdtrain.backends.objective.logits import class_axis_of
from hvdtrain.backends.objective.metric_objects import in_call_order, is_same_but_units
from hvdtrain.backends.objective.named_metrics import MetricFunctions
from hvdtrain.backends.objective.stateful_metrics import Collectives
from hvdtrain.backends.torch.objective.losses import LOSSES
from hvdtrain.backends.torch.state.tensors import as_array as to_numpy
from hvdtrain.data.naming import has_class

# classes of torchmetrics that look at every batch by itself whether all of it lies in [0, 1], and take it for
# logits if it does not: by how their names begin, or by name
_OF_NUMBERS = ("Binary", "Multilabel")
_OF_PROBABILITIES = ("MulticlassPrecisionRecallCurve", "MulticlassCalibrationError", "MulticlassHingeLoss")


def as_array(value: Any) -> NDArray[Any]:
    """Return what an update gave as an array: a tensor on any device, or what numpy takes."""
    return to_numpy(value.detach().cpu()) if isinstance(value, Tensor) else np.asarray(value)


class FedObject(shared.FedObject):
    """An object of torchmetrics, on the host."""

    framework = "torch"

    def __init__(self, name: str, value: Any, task: Any) -> None:
        super().__init__(name, value, task)
        self.metric = self.metric.clone().cpu()
        self.reset, self.result = self.metric.reset, torch.no_grad()(self.metric.compute)
        within = [one for one in self.metric.modules() if has_class(one, "torchmetrics.Metric")]
        for module in within:  # which is on rank 0 alone
            module._to_sync = module.sync_on_compute = module.dist_sync_on_step = False
        names = [
            kind.__name__
            for module in within
            for kind in type(module).__mro__
            if kind.__module__.startswith("torchmetrics.classification")
        ]
        self._takes_classes = bool(names)
        self._has_class_axis = any(name.startswith("Multiclass") for name in names)
        # what torchmetrics applies to the batches that it takes for logits
        self._guessed = "" if set(_OF_PROBABILITIES).isdisjoint(names) else "softmax"
        if any(name.startswith(_OF_NUMBERS) for name in names):
            self._guessed = "sigmoid"
        self.ignored = [getattr(module, "ignore_index", None) for module in within]

    @torch.no_grad()
    def _update(self, preds: NDArray[Any], targets: NDArray[Any], mask: NDArray[Any] | None) -> None:
        given, wanted = torch.from_numpy(preds), torch.from_numpy(targets)
        if self._takes_classes:
            given, wanted = self._of_classes(given, wanted)
        if is_same_but_units(given, wanted):
            given = given.reshape(wanted.shape)
        in_call_order(self.metric.update, given, wanted, targets_first=False)

    def _of_classes(self, preds: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return what metrics of classes take: classes on axis 1, probabilities, and integers as targets."""
        if targets.is_floating_point() and bool((targets == targets.round()).all()):
            targets = targets.long()
        if not preds.is_floating_point():
            return preds, targets
        is_output = self.given.preds is None
        if self._has_class_axis and is_output and preds.dim() == targets.dim() + 1:
            shapes = tuple(preds.shape), tuple(targets.shape)
            preds = preds.movedim(class_axis_of(f"metrics[{self.name!r}]", *shapes, self.class_axis), 1)
        if self._guessed and is_output and self.activation:
            preds = preds.sigmoid() if self._guessed == "sigmoid" else preds.softmax(1)
        elif self._guessed and not bool(((preds >= 0) & (preds <= 1)).all()):
            raise self.error(
                "is given numbers outside of [0, 1]. torchmetrics takes a batch for logits if it has such "
                "numbers and for probabilities if not, so the value would depend on the batches",
                f"Give probabilities: hvdtrain.MetricObject(torch=..., preds=lambda outputs, batch: "
                f"outputs.{'sigmoid()' if self._guessed == 'sigmoid' else 'softmax(1)'}).",
            )
        return preds, targets


class HorovodCollectives(Collectives):
    """How objects, as bytes, and the states of metrics move between workers."""

    hvd = hvd
    to_tensor = staticmethod(torch.from_numpy)

    def is_under_way(self) -> bool:
        """Return whether this worker began an operation that it has not waited for: Horovod keeps those."""
        return bool(mpi_ops._handle_map)


FUNCTIONS = MetricFunctions("torch", as_array, FedObject, LOSSES)
