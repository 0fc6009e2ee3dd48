"""Objects of torchmetrics in an evaluation, and what else it needs; as in ``tensorflow/``."""

from functools import partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch
from horovod.torch import mpi_ops
from numpy.typing import NDArray
from torch import Tensor

from hvdtrain.backends.objective import metric_objects as shared
from hvdtrain.backends.objective.evaluation_metrics import MetricFunctions
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

    framework, class_place, targets_first = "torch", 1, False

    def __init__(self, name: str, value: Any, task: Any) -> None:
        super().__init__(name, value, task)
        self.metric = metric = self.metric.clone().cpu()
        self.reset = metric.reset
        self.update, self.result = torch.no_grad()(metric.update), torch.no_grad()(metric.compute)
        within = [one for one in metric.modules() if has_class(one, "torchmetrics.Metric")]
        for module in within:  # which is on rank 0 alone
            module._to_sync = module.sync_on_compute = module.dist_sync_on_step = False
        names = [
            kind.__name__
            for module in within
            for kind in type(module).__mro__
            if kind.__module__.startswith("torchmetrics.classification")
        ]
        self._takes_classes = bool(names)
        self.moves_classes = any(name.startswith("Multiclass") for name in names)
        # what torchmetrics applies to the batches that it takes for logits
        self._guessed = "" if set(_OF_PROBABILITIES).isdisjoint(names) else "softmax"
        if any(name.startswith(_OF_NUMBERS) for name in names):
            self._guessed = "sigmoid"
        self.needs_probabilities = bool(self._guessed)
        self.activation = self._guessed if self.of_logits else ""
        self.ignored = [getattr(module, "ignore_index", None) for module in within]

    def probabilities(self, logits: NDArray[Any]) -> NDArray[Any]:
        """Return the activation of logits."""
        given = torch.from_numpy(logits)
        return (given.sigmoid() if self.activation == "sigmoid" else given.softmax(1)).numpy()

    @torch.no_grad()
    def as_arguments(
        self, preds: NDArray[Any], targets: NDArray[Any], mask: NDArray[Any] | None
    ) -> tuple[Tensor, Tensor]:
        """Return predictions and targets as tensors; whole numbers as integers, for metrics of classes."""
        if self._takes_classes and targets.dtype.kind == "f" and (targets == targets.round()).all():
            targets = targets.astype(np.int64)
        return torch.from_numpy(preds), torch.from_numpy(targets)


# Horovod keeps the operations that this worker began and has not waited for
COLLECTIVES = partial(
    Collectives, hvd=hvd, to_tensor=torch.from_numpy, is_under_way=lambda: bool(mpi_ops._handle_map)
)
FUNCTIONS = MetricFunctions("torch", as_array, FedObject, LOSSES)
