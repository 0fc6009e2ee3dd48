"""From a task's loss and metrics to one function of (model, batch), in either framework."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from hvdtrain.backends.objective.evaluation_metrics import (
    NAMES,
    EvaluationMetrics,
    MetricFunctions,
    is_stateful,
)
from hvdtrain.backends.objective.logits import OF_CLASSES, class_axis_option, named_loss, of_tensor
from hvdtrain.backends.objective.losses import Counting, Weighted, counting_of
from hvdtrain.backends.objective.model_call import ModelCall, Serving, nested_batch
from hvdtrain.config import Config
from hvdtrain.data.augment import SHARE, partner_of
from hvdtrain.early_stopping import check_metric_names
from hvdtrain.errors import ConfigError, TaskError
from hvdtrain.storage.text import did_you_mean
from hvdtrain.workers.agreement import Workers

Batch = Mapping[str, Any]
Cast = Callable[[Any, Any], Any]  # of a tensor to a type
Function = Callable[..., Any]
_LEAST = 1e-30  # in place of a weight of 0


def mixed(loss: Function, cast: Cast) -> Function:
    """Return the loss of samples that mixup or CutMix made: that of both samples, by their shares."""

    def of_both(outputs: Any, batch: Mapping[str, Any]) -> Any:
        if SHARE not in batch:  # samples as they are
            return loss(outputs, batch)
        own, other = loss(outputs, batch), loss(outputs, partner_of(batch))
        if not isinstance(own, Weighted):
            share = cast(batch[SHARE], own.dtype)
            return own * (1 - share) + other * share
        if not own.values.shape:
            raise TaskError(
                "mixup and cutmix mix the losses of samples; the task's loss gives the mean of a batch",
                "Give one value per sample, or mix in the task's own loss.",
            )
        share = cast(batch[SHARE], own.values.dtype)
        parts = cast(own.weights, share.dtype) * (1 - share), cast(other.weights, share.dtype) * share
        weights = parts[0] + parts[1]
        return Weighted((own.values * parts[0] + other.values * parts[1]) / (weights + _LEAST), weights)

    return of_both


# (model, batch) -> (loss per sample, {metric name: value per sample}); each may be Weighted
Objective = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]
REGULARIZATION_LOSS = "regularization_loss"  # the metric of what the model itself adds to the loss


def make_objective(
    task: Any,
    framework: str,
    table: Mapping[str, Function],
    label_smoothing: float = 0.0,
    *,
    mixed: Callable[[Function], Function] | None = None,
    watch: Callable[[Any, Batch], None] | None = None,
) -> Objective:
    """Make the function that a step differentiates. It takes batches with flat names."""
    own = getattr(task, f"{framework}_loss", None)
    if own is not None:
        return _own_objective(task, own, framework)
    if not hasattr(task, "loss") and hasattr(task, f"{framework}_step"):
        return partial(_no_objective, framework)
    given, of_object = named_loss(getattr(task, "loss", None), framework)
    of_loss, axis = counting_of(task, given), class_axis_option(task)
    options: dict[str, Any] = {"counting": of_loss, **axis, **of_object}
    if label_smoothing:
        if of_object or given != "cross_entropy":
            found = "an object with its own label_smoothing" if of_object else given
            raise ConfigError(
                "label_smoothing acts on the named loss cross_entropy; the task's loss is "
                f"{'a function of its own' if callable(given) else found}",
                "Leave label_smoothing out, or smooth the targets in the task's loss.",
                everywhere=True,
            )
        options["label_smoothing"] = label_smoothing
    loss = _look_up("loss", given, table, options)
    loss = loss if mixed is None else mixed(loss)
    named = getattr(task, "metrics", {})
    if not isinstance(named, Mapping):
        raise TaskError(
            f"the task's metrics must be a mapping of names to metrics, found {named!r}",
            'Write, for example, metrics = {"accuracy": "accuracy"}.',
        )
    check_metric_names(named, "the task's metrics")
    of_metrics = {"counting": Counting(of_loss.ignore_index, of_loss.of_samples), **axis}
    metrics = {
        name: _look_up(f"metrics[{name!r}]", value, table, of_metrics)
        for name, value in named.items()
        if not is_stateful(value)
    }
    call = ModelCall(framework, next((v for v in (given, *named.values()) if isinstance(v, str)), ""))

    def objective(model: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        outputs, batch = call(model, batch)
        if watch is not None:
            watch(outputs, batch)
        return loss(outputs, batch), {name: metric(outputs, batch) for name, metric in metrics.items()}

    return objective


def _look_up(field: str, value: Any, table: Mapping[str, Function], options: Mapping[str, Any]) -> Function:
    """Return the function of a loss or metric: a user's own, or a named one with those options it takes."""
    if callable(value):
        return value
    if not isinstance(value, str) or value not in table:
        known = [*table, *(NAMES if field != "loss" else ())]
        raise TaskError(
            f"the task's {field} is {value!r}, which is neither a function nor a known name",
            did_you_mean(value, known) or f"Known: {', '.join(sorted(known))}.",
        )
    taken = {name: given for name, given in options.items() if name != "class_axis" or value in OF_CLASSES}
    return of_tensor(value, partial(table[value], **taken))


def _own_objective(task: Any, own: Any, framework: str) -> Objective:
    """Return a task's own objective, which is given batches nested and whose result is checked."""
    name = f"{framework}_loss"
    counting_of(task, f"its own {name}")
    named_loss(own, framework, name)  # refuses those of a library
    if framework == "tf":  # a Keras layer takes no model by position
        own = getattr(own, "call", own)
    metrics = getattr(task, "metrics", {})
    replaced = next((key for key, metric in metrics.items() if is_stateful(metric)), None)
    if replaced is not None:
        raise TaskError(
            f"the task's {name} replaces the model call, loss and metrics, and metrics[{replaced!r}] is "
            "computed from the outputs of that call",
            f"Leave {name} out and give the task a loss, which may be a function of (outputs, batch); or "
            "leave the metric out.",
        )
    return lambda model, batch: checked_result(own(model, nested_batch(batch)), name)


def checked_result(result: Any, name: str) -> tuple[Any, dict[str, Any]]:
    """Return the loss and the metrics that a task's own method returned."""
    is_pair = isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping)
    if not is_pair:
        parts = ", ".join(type(part).__name__ for part in result) if isinstance(result, tuple | list) else ""
        raise TaskError(
            f"{name} must return (loss per sample, {{metric: value per sample}}); found a "
            f"{type(result).__name__}{f' of ({parts})' if parts else ''}",
            "Return (loss, {}) if there are no metrics, and a loss per sample: with reduction='none' in "
            "PyTorch, that of a function such as keras.losses.mean_squared_error in Keras.",
            everywhere=True,
        )
    check_metric_names(result[1], f"{name}()")
    return result[0], dict(result[1])


def _no_objective(framework: str, *_: Any) -> Any:
    """Refuse an evaluation of a task that has only its own training step."""
    raise TaskError(
        f"the task has {framework}_step and no loss, which says what an evaluation computes",
        f"Add loss or {framework}_loss(model, batch).",
        everywhere=True,
    )


def has_own_values(task: Any, framework: str) -> bool:
    """Return whether a task has a loss or metric of its own, which may look at all rows of a batch."""
    if hasattr(task, f"{framework}_loss") or callable(getattr(task, "loss", None)):
        return True
    return any(callable(m) and not is_stateful(m) for m in getattr(task, "metrics", {}).values())


class ComputationBase:
    """What the computations of both frameworks share: objectives, and metrics of an evaluation."""

    def __init__(
        self, task: Any, config: Config, workers: Workers, functions: MetricFunctions, cast: Cast
    ) -> None:
        self.task, self.config, self._workers = task, config, workers
        self.names: tuple[str, ...] = ()  # of the sums
        self.weighted: tuple[str, ...] = ()  # those of them with weights of their own
        framework, table = functions.framework, functions.losses.table
        self.serving = Serving(task, framework, make_objective(task, framework, table))
        mixing = partial(mixed, cast=cast) if config.mixup or config.cutmix else None
        self.train_objective = make_objective(task, framework, table, config.label_smoothing, mixed=mixing)
        self.evaluation = EvaluationMetrics(task, functions)
        watch = self._watch if self.evaluation else None
        self.eval_objective = make_objective(task, framework, table, watch=watch)
        # whether loss or metrics are the task's own functions, which are given no padding
        self.is_own_loss = has_own_values(task, framework)

    def _watch(self, outputs: Any, batch: Mapping[str, Any]) -> None:
        self.evaluation.watch(outputs, batch)
