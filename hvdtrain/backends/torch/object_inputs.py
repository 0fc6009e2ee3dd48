"""What an object of torchmetrics is given; ``tensorflow/object_inputs.py`` does the same for Keras."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree

from hvdtrain.backends.objective.logits import class_axis_of, logits_of
from hvdtrain.backends.objective.metric_objects import (
    TakenObject,
    in_call_order,
    is_same_but_units,
    targets_of,
)
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
