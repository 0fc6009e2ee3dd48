"""From a task's loss and metrics to one function of (model, batch), in either framework."""

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.metric_names import check_metric_names

# (model, batch) -> (loss per sample, {metric name: value per sample})
Objective = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]


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
    if label_smoothing:
        _check_can_smooth(f"its own {framework}_loss" if own else getattr(task, "loss", None))
    if own is not None:
        return _with_checked_names(own, f"{framework}_loss")
    loss = _look_up("loss", task.loss, table)
    if label_smoothing:
        loss = partial(loss, label_smoothing=label_smoothing)
    named = getattr(task, "metrics", {})
    if not isinstance(named, Mapping):
        raise TaskError(f"the task's metrics must be a mapping of names to metrics, found {named!r}")
    check_metric_names(named, "the task's metrics")
    metrics = {name: _look_up(f"metrics[{name!r}]", value, table) for name, value in named.items()}

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


def check_per_sample(name: str, shape: tuple[int, ...], samples: int) -> None:
    """Check that a loss or metric gave one value per sample.

    Raises:
        TaskError: naming it and the shape that it gave.
    """
    if tuple(shape) != (samples,):
        raise TaskError(
            f"{name} must give one value per sample, shape ({samples},); found shape {tuple(shape)}",
            "Take the mean over all axes but the first, and no mean over samples.",
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


def _look_up(field: str, value: Any, table: Mapping[str, Callable[..., Any]]) -> Callable[..., Any]:
    if callable(value):
        found: Callable[..., Any] = value
        return found
    if not isinstance(value, str) or value not in table:
        close = difflib.get_close_matches(str(value), table, n=1)
        raise TaskError(
            f"the task's {field} is {value!r}, which is neither a function nor a known name",
            f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(table))}.",
        )
    return table[value]
