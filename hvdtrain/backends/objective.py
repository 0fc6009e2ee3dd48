"""From a task's loss and metrics to one function of (model, batch), in either framework."""

import difflib
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.metric_names import check_metric_names


class Weighted(NamedTuple):
    """Values that count with weights: what a loss or metric may return in place of one value per sample.

    The result of a step is sum(weights * values) / sum(weights), over all samples of all workers. Both
    have the shape (samples,); or both are single numbers: the mean of a batch, and what it is a mean over,
    such as the number of its rows or tokens. No gradient flows through weights.

    Attributes:
        values: the values; the loss is differentiated through them.
        weights: their weights, finite and not negative.
    """

    values: Any
    weights: Any


# (model, batch) -> (loss per sample, {metric name: value per sample}); each may be Weighted
Objective = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]

IGNORE_INDEX = -100  # as in PyTorch


@dataclass(frozen=True)
class Counting:
    """Which targets a named loss or metric counts, and how much.

    Attributes:
        ignore_index: the target that does not count.
        class_weights: the weight of each class, or None if all count alike.
        batch_weights: whether a batch's ``weights`` count.
    """

    ignore_index: int = IGNORE_INDEX
    class_weights: tuple[float, ...] | None = None
    batch_weights: bool = False


OF_METRICS = Counting()

# the metric of what the model itself adds to the loss
REGULARIZATION_LOSS = "regularization_loss"


def make_objective(
    task: Any, framework: str, table: Mapping[str, Callable[..., Any]], label_smoothing: float = 0.0
) -> Objective:
    """Make the function that a step differentiates.

    Args:
        task: the task.
        framework: "torch" or "tf"; the task's ``<framework>_loss`` goes before ``loss``.
        table: the framework's named losses and metrics, each (outputs, batch) -> per sample.
        label_smoothing: part of the target that loss cross_entropy spreads over all classes.

    Raises:
        TaskError: If a loss or metric is neither a known name nor a function.
        ConfigError: If there is label smoothing and the loss is not the named cross_entropy.
    """
    own: Objective | None = getattr(task, f"{framework}_loss", None)
    chosen = f"its own {framework}_loss" if own else getattr(task, "loss", None)
    if label_smoothing:
        _check_can_smooth(chosen)
    of_loss = _counting(task, chosen)
    if own is not None:
        return _with_checked_names(own, f"{framework}_loss")
    loss = _look_up("loss", task.loss, table, of_loss)
    if label_smoothing:
        loss = partial(loss, label_smoothing=label_smoothing)
    named = getattr(task, "metrics", {})
    if not isinstance(named, Mapping):
        raise TaskError(f"the task's metrics must be a mapping of names to metrics, found {named!r}")
    check_metric_names(named, "the task's metrics")
    of_metrics = Counting(of_loss.ignore_index)
    metrics = {
        name: _look_up(f"metrics[{name!r}]", value, table, of_metrics) for name, value in named.items()
    }

    def objective(model: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        if "inputs" not in batch:
            raise TaskError(
                f"samples have no 'inputs' for the model; they have {sorted(batch)}",
                f"Name the key, hvdtrain.as_dataset(data, inputs=...), or give the task {framework}_loss.",
            )
        outputs = model(batch["inputs"])
        return loss(outputs, batch), {name: metric(outputs, batch) for name, metric in metrics.items()}

    return objective


def _with_checked_names(own: Objective, name: str) -> Objective:
    """Return the task's own loss with a check of its metrics' names, which are known when it is called."""

    def objective(model: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        result = own(model, batch)
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            check_metric_names(result[1], f"{name}()")
        return result

    return objective


def check_per_sample(name: str, shape: tuple[int | None, ...], samples: int | None) -> None:
    """Check that a loss or metric gave one value per sample.

    Raises:
        TaskError: naming it and the shape that it gave.
    """
    if tuple(shape) != (samples,):
        raise TaskError(
            f"{name} must give one value per sample, shape ({samples},); found shape {tuple(shape)}",
            "Take the mean over all axes but the first, and no mean over samples. "
            "If it is the mean of a batch, give hvdtrain.Weighted(mean, number of rows or tokens).",
        )


def check_weighted(
    name: str, values: tuple[int | None, ...], weights: tuple[int | None, ...], samples: int | None
) -> None:
    """Check that a loss or metric that is Weighted has a value and a weight per sample, or one of each.

    Args:
        name: the loss or metric, in messages.
        values: shape of its values.
        weights: shape of its weights.
        samples: number of samples; None if it is not known yet.

    Raises:
        TaskError: naming it and the shapes that it gave.
    """
    if values != weights or values not in ((), (samples,)):
        raise TaskError(
            f"{name} is Weighted: values and weights must both have the shape ({samples},), or be one number "
            f"each; found {values} and {weights}",
            "Give a value and a weight for each sample, or the batch's mean and what it is a mean over.",
        )


def check_form_stays(gives_mean: bool) -> None:
    """Check that no batch's mean was taken over padding, where a value per sample was given before.

    Raises:
        TaskError: If it was.
    """
    if gives_mean:
        raise TaskError(
            "the loss or a metric gave one value per sample before, and now the mean of a batch with padding",
            "Give the same in every step: a value per sample, or hvdtrain.Weighted of one number each.",
        )


def check_weights_fit(name: str, weights: tuple[int | None, ...], targets: tuple[int | None, ...]) -> bool:
    """Return whether a batch's ``weights`` are per position; False if they are per sample.

    Raises:
        TaskError: If their shape is neither (samples,) nor that of the targets.
    """
    if weights not in (targets[:1], targets):
        raise TaskError(
            f"{name} takes batch['weights'] per sample, {targets[:1]}, or per target, {targets}; "
            f"found shape {weights}",
            "Give the samples weights of one of these shapes, or name the key differently.",
        )
    return len(weights) > 1


def check_class_weights(weights: Sequence[float], classes: int) -> None:
    """Check that there is a weight for each class of the outputs.

    Raises:
        TaskError: naming both numbers.
    """
    if len(weights) != classes:
        raise TaskError(
            f"class_weights has {len(weights)} numbers; the model's outputs have {classes} classes",
            "Give class_weights one number for each class.",
        )


def check_free(name: str, metrics: Mapping[str, Any]) -> None:
    """Check that the task has no metric of a name that hvdtrain logs.

    Raises:
        TaskError: If it has one.
    """
    if name in metrics:
        raise TaskError(
            f"the task has a metric {name!r}; hvdtrain logs the model's own losses under this name",
            "Give the metric another name.",
        )


def check_comparable(name: str, outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    """Check that outputs and targets have equal shapes, or differ by axes of length 1 only.

    Raises:
        TaskError: naming both shapes. Broadcasting them would compare every sample with every other.
    """
    if [n for n in outputs[1:] if n != 1] != [n for n in targets[1:] if n != 1]:
        raise TaskError(
            f"{name} compares the model's outputs {outputs} with targets {targets}: shapes differ"
        )


def _check_can_smooth(loss: Any) -> None:
    if loss != "cross_entropy":
        found = "a function of its own" if callable(loss) else loss
        raise ConfigError(
            f"label_smoothing acts on the named loss cross_entropy; the task's loss is {found}",
            "Leave label_smoothing out, or smooth the targets in the task's loss.",
            everywhere=True,
        )


def _counting(task: Any, loss: Any) -> Counting:
    """Return what the task says of the targets that its loss counts.

    Raises:
        TaskError: If ``ignore_index`` or ``class_weights`` cannot be used.
    """
    ignored = getattr(task, "ignore_index", IGNORE_INDEX)
    if not isinstance(ignored, numbers.Integral) or isinstance(ignored, bool):
        raise TaskError(
            f"the task's ignore_index must be a class number that does not count, found {ignored!r}",
            f"Give an integer, or leave it out: the default is {IGNORE_INDEX}.",
        )
    given = getattr(task, "class_weights", None)
    if given is None:
        return Counting(int(ignored), batch_weights=True)
    if loss != "cross_entropy":
        found = "a function of its own" if callable(loss) else loss
        raise TaskError(
            f"class_weights acts on the named loss cross_entropy; the task's loss is {found}",
            "Leave class_weights out, or return hvdtrain.Weighted(losses, weights) from the task's loss.",
        )
    return Counting(int(ignored), _class_weights(given), batch_weights=True)


def _class_weights(given: Any) -> tuple[float, ...]:
    """Return the weights of the classes, with a mean of 1: only their ratios matter.

    Raises:
        TaskError: If they are not finite numbers of at least 0, or all of them are 0.
    """
    try:
        found = tuple(float(weight) for weight in given)
    except (TypeError, ValueError):
        found = ()
    is_right = not isinstance(given, Mapping | str) and all(0 <= w < math.inf for w in found)
    if not is_right or not sum(found):
        raise TaskError(
            f"the task's class_weights must be numbers of at least 0, one for each class; found {given!r}",
            "Give a list of finite numbers, such as [1.0, 4.0], of which at least one is not 0.",
        )
    return tuple(weight * len(found) / sum(found) for weight in found)


def _look_up(
    field: str, value: Any, table: Mapping[str, Callable[..., Any]], counting: Counting
) -> Callable[..., Any]:
    if callable(value):
        found: Callable[..., Any] = value
        return found
    if not isinstance(value, str) or value not in table:
        close = difflib.get_close_matches(str(value), table, n=1)
        raise TaskError(
            f"the task's {field} is {value!r}, which is neither a function nor a known name",
            f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(table))}.",
        )
    return partial(table[value], counting=counting)
