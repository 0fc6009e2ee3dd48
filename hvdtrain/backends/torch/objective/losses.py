"""Named losses and metrics in PyTorch, and objects of torchmetrics; ``tensorflow/`` has those of Keras."""

from collections.abc import Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from hvdtrain.backends.objective import metric_objects as shared
from hvdtrain.backends.objective.evaluation_metrics import MetricFunctions
from hvdtrain.backends.objective.logits import bad_target
from hvdtrain.backends.objective.losses import NamedLosses, PerSample, Values, Weighted
from hvdtrain.backends.torch.state.tensors import as_array as to_numpy
from hvdtrain.data.naming import has_class

Array = NDArray[Any]


def as_arrays(value: Any) -> tuple[Array, Array | None]:
    """Return the values that a loss or metric gave, and their weights if they have some."""
    parts = value if isinstance(value, Weighted) else (value, None)
    return tuple(None if p is None else torch.as_tensor(p).detach().double().cpu().numpy() for p in parts)  # type: ignore[return-value]


def weigh(given: Mapping[str, Any], samples: int, kind: torch.dtype) -> Values[torch.Tensor]:
    """Return values and weights of a loss, the first, and of metrics, for each sample."""
    losses: Tensor | None = None
    loss_weights: Tensor | None = None
    rows, weight_rows = [], []
    for value in given.values():
        weights: Tensor | None = None
        if isinstance(value, Weighted):
            values = value.values.to(kind)
            weights = torch.as_tensor(value.weights, dtype=kind, device=values.device).detach()
            if values.dim() == 0:
                values, weights = values.expand(samples), (weights / samples).expand(samples)
            weight_rows.append(weights)
        else:
            values = value.to(kind)
        if losses is None:
            losses, loss_weights = values, weights
        rows.append(values.detach() if weights is None else values.detach() * weights)
    assert losses is not None  # a loss is the first
    return Values(losses, loss_weights, torch.stack(rows + weight_rows))


_NO_CLASS = -(1 << 31)  # as ignore_index it ignores nothing


@cache
def _table(weights: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(weights, device=device)


def _aligned(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    return outputs.reshape(targets.shape), targets.to(outputs.dtype)


def _entropies(outputs: Tensor, targets: Tensor, counted: Tensor, ignored: int, smoothing: float) -> Tensor:
    soft = targets.dim() == outputs.dim()
    try:
        return F.cross_entropy(
            outputs.reshape(-1, outputs.shape[-1]),
            targets.reshape(-1, outputs.shape[-1]) if soft else targets.reshape(-1),
            ignore_index=_NO_CLASS if counted is targets else ignored,
            reduction="none",
            label_smoothing=smoothing,
        ).reshape(outputs.shape[:-1])
    except IndexError as error:
        raise bad_target(error) or error from None


def _compared(name: str, outputs: Tensor, targets: Tensor) -> Tensor:
    if name == "binary_accuracy":
        return ((outputs > 0) == (targets > 0.5)).float()
    if name == "binary_cross_entropy":
        return F.binary_cross_entropy_with_logits(outputs, targets, reduction="none")
    return (F.mse_loss if name == "mse" else F.l1_loss)(outputs, targets, reduction="none")


def _means(values: Tensor, weights: Tensor | None) -> PerSample:
    if values.dim() == 1:
        return values if weights is None else Weighted(values, weights)
    if weights is None:
        return values.flatten(1).mean(1)
    weights = weights.expand_as(values)
    sums, shares = (
        (part.flatten(2).mean(2) if part.dim() > 2 else part).sum(1) for part in (values * weights, weights)
    )
    return Weighted(sums / shares.where(shares > 0, 1.0), shares)


LOSSES = NamedLosses(
    rank=Tensor.dim,
    floats=Tensor.float,
    is_floating=torch.is_floating_point,
    largest=lambda tensor: tensor.argmax(-1),
    moved_last=lambda tensor, axis: tensor.movedim(axis, -1),
    aligned=_aligned,
    with_zeros=lambda targets, counted: targets * counted.long(),
    looked_up=lambda weights, classes: _table(weights, classes.device)[classes],
    entropies=_entropies,
    compared=_compared,
    is_largest=lambda outputs, classes: outputs.argmax(-1) == classes,
    is_in_top5=lambda outputs, of: (outputs > outputs.gather(-1, of.unsqueeze(-1))).sum(-1) < 5,
    means=_means,
)
NAMED = LOSSES.table


# classes of torchmetrics that look at every batch by itself whether all of it lies in [0, 1], and take it for
# logits if it does not: by how their names begin, or by name
_OF_NUMBERS = ("Binary", "Multilabel")
_OF_PROBABILITIES = ("MulticlassPrecisionRecallCurve", "MulticlassCalibrationError", "MulticlassHingeLoss")


def as_array(value: Any) -> Array:
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

    def probabilities(self, logits: Array) -> Array:
        """Return the activation of logits."""
        given = torch.from_numpy(logits)
        return (given.sigmoid() if self.activation == "sigmoid" else given.softmax(1)).numpy()

    @torch.no_grad()
    def as_arguments(self, preds: Array, targets: Array, mask: Array | None) -> tuple[Tensor, Tensor]:
        """Return predictions and targets as tensors; whole numbers as integers, for metrics of classes."""
        if self._takes_classes and targets.dtype.kind == "f" and (targets == targets.round()).all():
            targets = targets.astype(np.int64)
        return torch.from_numpy(preds), torch.from_numpy(targets)


FUNCTIONS = MetricFunctions("torch", as_array, FedObject, LOSSES)
