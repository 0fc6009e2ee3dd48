"""From a task's loss and metrics to one function of (model, batch), in either framework."""

import difflib
import functools
import math
import numbers
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from hvdtrain.backends.loss_objects import named_loss
from hvdtrain.backends.model_call import ModelCall, nested_batch
from hvdtrain.data.unsupported import type_name
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


# the named losses and metrics whose outputs have an axis of classes
OF_CLASSES = ("cross_entropy", "accuracy", "top5_accuracy")

# (model, batch) -> (loss per sample, {metric name: value per sample}); each may be Weighted
Objective = Callable[[Any, Mapping[str, Any]], tuple[Any, dict[str, Any]]]

IGNORE_INDEX = -100  # as in PyTorch


@dataclass(frozen=True)
class Counting:
    """Which targets a named loss or metric counts, and how much.

    Attributes:
        ignore_index: the target that does not count.
        of_samples: whether it is looked for if a sample has one target, too, and not only if it has several.
        class_weights: the weight of each class, or None if all count alike.
        batch_weights: whether a batch's ``weights`` count.
    """

    ignore_index: int = IGNORE_INDEX
    of_samples: bool = False
    class_weights: tuple[float, ...] | None = None
    batch_weights: bool = False


OF_METRICS = Counting()

# the metric of what the model itself adds to the loss
REGULARIZATION_LOSS = "regularization_loss"


def make_objective(
    task: Any, framework: str, table: Mapping[str, Callable[..., Any]], label_smoothing: float = 0.0
) -> Objective:
    """Make the function that a step differentiates. It takes batches with flat names.

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
    if own is not None:
        if label_smoothing:
            _check_can_smooth(f"its own {framework}_loss")
        _counting(task, f"its own {framework}_loss")
        return _own_objective(own, f"{framework}_loss")
    given, options = named_loss(getattr(task, "loss", None), framework)
    if label_smoothing:
        _check_can_smooth("an object with its own label_smoothing" if options else given)
        options = {"label_smoothing": label_smoothing}
    of_loss, axis = _counting(task, given), _class_axis(task)
    loss = _look_up("loss", given, table, {"counting": of_loss, **axis, **options})
    named = getattr(task, "metrics", {})
    if not isinstance(named, Mapping):
        raise TaskError(f"the task's metrics must be a mapping of names to metrics, found {named!r}")
    check_metric_names(named, "the task's metrics")
    of_metrics = {"counting": Counting(of_loss.ignore_index, of_loss.of_samples), **axis}
    metrics = {
        name: _look_up(f"metrics[{name!r}]", value, table, of_metrics) for name, value in named.items()
    }
    call = ModelCall(framework, next((str(v) for v in (given, *named.values()) if not callable(v)), ""))

    def objective(model: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        outputs, batch = call(model, batch)
        return loss(outputs, batch), {name: metric(outputs, batch) for name, metric in metrics.items()}

    return objective


def _class_axis(task: Any) -> dict[str, int]:
    """Return the task's ``class_axis`` as an option of the losses and metrics; nothing if it has none.

    Raises:
        TaskError: If it is neither -1 nor 1.
    """
    class_axis: int | None = getattr(task, "class_axis", None)
    if class_axis not in (None, 1, -1):
        raise TaskError(
            f"the task's class_axis is {class_axis!r}; it must be -1 for outputs (batch, ..., classes) or 1 "
            "for outputs (batch, classes, ...)"
        )
    return {} if class_axis is None else {"class_axis": class_axis}


def _own_objective(own: Objective, name: str) -> Objective:
    """Return a task's own objective, which is given batches nested and whose result is checked."""

    def objective(model: Any, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        result = own(model, nested_batch(batch))
        is_pair = isinstance(result, tuple | list) and len(result) == 2 and isinstance(result[1], Mapping)
        if not is_pair:
            raise TaskError(
                f"{name} must return (loss per sample, {{metric: value per sample}}); "
                f"found {_kinds_of(result)}",
                "Return (loss, {}) if there are no metrics, and a loss with reduction='none'.",
                everywhere=True,
            )
        check_metric_names(result[1], f"{name}()")
        return result[0], dict(result[1])

    return objective


def may_give_mean(task: Any, framework: str) -> bool:
    """Return whether a task has a loss or metric of its own, which may give the mean of a batch."""
    if hasattr(task, f"{framework}_loss") or callable(task.loss):
        return True
    return any(callable(metric) for metric in getattr(task, "metrics", {}).values())


def sample_values(names: Sequence[str], weighted: Sequence[str], rows: Any, weights: Any) -> dict[str, Any]:
    """Return name to array (samples,), whose plain mean over the samples is the mean over what counts.

    Args:
        names: the loss and the metrics.
        weighted: those of them that have weights of their own.
        rows: (numbers, samples): for each name the values, times their weights; then the weights.
        weights: (samples,), 0 for padding.
    """
    found = dict(zip(names, rows, strict=False))
    for name, own in zip(weighted, rows[len(names) :], strict=True):
        found[name] = found[name] / ((weights * own).sum() / (weights.sum() or 1.0) or 1.0)
    return found


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


def check_weights_fit(name: str, weights: tuple[int | None, ...], targets: tuple[int | None, ...]) -> None:
    """Check that a batch's ``weights`` are per sample or per target.

    Raises:
        TaskError: If their shape is neither (samples,) nor that of the targets.
    """
    if weights not in (targets[:1], targets):
        raise TaskError(
            f"{name} takes batch['weights'] per sample, {targets[:1]}, or per target, {targets}; "
            f"found shape {weights}",
            "Give the samples weights of one of these shapes, or name the key differently.",
        )


def bad_target(error: Exception) -> TaskError | None:
    """Return the error of a target that is no class, if a framework's error says that there is one."""
    found = re.search(r"(?:Target|a label value of) (-?\d+)", str(error))
    if found is None:
        return None
    return TaskError(
        f"cross_entropy: target {found[1]} is not the number of a class of the model's outputs",
        f"If it marks what is to be left out, give the task ignore_index = {found[1]}.",
    )


def check_class_weights(weights: Sequence[float], classes: int, soft: bool) -> None:
    """Check that there is a weight for each class of the outputs, and that targets are class numbers.

    Args:
        weights: the task's class weights.
        classes: number of classes of the outputs.
        soft: whether the targets are a probability for each class.

    Raises:
        TaskError: If the numbers differ, or the targets are probabilities.
    """
    if soft:
        raise TaskError(
            "class_weights takes class numbers as targets; found a probability for each class",
            "Leave class_weights out, or return hvdtrain.Weighted(losses, weights) from the task's loss.",
        )
    if len(weights) != classes:
        raise TaskError(
            f"class_weights has {len(weights)} numbers; the model's outputs have {classes} classes",
            "Give class_weights one number for each class.",
        )


def check_free(name: str, metrics: Mapping[str, Any]) -> None:
    """Check that the task has no metric of a name that hvdtrain logs for some models.

    Raises:
        TaskError: If it has one.
    """
    if name in metrics:
        raise TaskError(
            f"the task has a metric {name!r}; hvdtrain logs the model's own losses under this name",
            "Give the metric another name.",
        )


@functools.lru_cache
def class_axis_of(
    name: str, outputs: tuple[int, ...], targets: tuple[int, ...], class_axis: int | None = None
) -> int:
    """Return the axis of the classes in logits: the last one, or 1 as in PyTorch's convolutions.

    Args:
        name: of the loss or metric, for messages.
        outputs: shape of the logits.
        targets: shape of the class numbers, or of a probability for each class.
        class_axis: the task's; found by the shapes if None.

    Raises:
        TaskError: If neither fits, or both do and the task does not say which.
    """
    last = len(outputs) - 1
    given = None if class_axis is None or last < 1 else class_axis % len(outputs)
    if None in outputs:  # TensorFlow does not know all of it while it traces the step
        fits_first = last > 1 and _may_lack(outputs, targets, 1) and not _may_lack(outputs, targets, last)
        return given if given is not None else 1 if fits_first else last
    if last < 1:
        fitting = set()
    elif outputs == targets:
        fitting = {1, last}
    else:
        fitting = {axis for axis in (1, last) if outputs[:axis] + outputs[axis + 1 :] == targets}
        fitting |= {last} if (*outputs[:-1], 1) == targets else set()
    if given is not None and given in fitting:
        return given
    if len(fitting) == 1 and given is None:
        return fitting.pop()
    shapes = f"outputs {outputs} and targets {targets}"
    if fitting and given is None:
        raise TaskError(
            f"{name} cannot tell which axis of the model's outputs holds the classes: {shapes}",
            "Set class_axis in the task: -1 (batch, ..., classes) or 1 (batch, classes, ...).",
        )
    raise TaskError(
        f"{name} takes logits (batch, ..., classes) or (batch, classes, ...) and class numbers (batch, ...), "
        f"or probabilities of the logits' shape; found {shapes}"
        + ("" if class_axis is None else f" with class_axis {class_axis}")
    )


def _may_lack(outputs: tuple[int | None, ...], targets: tuple[int | None, ...], axis: int) -> bool:
    """Return whether targets can have the shape of the outputs without an axis, as far as it is known."""
    rest = outputs[:axis] + outputs[axis + 1 :]
    return len(rest) == len(targets) and all(
        None in (a, b) or a == b for a, b in zip(rest, targets, strict=True)
    )


def check_class_numbers(name: str, is_floating: bool, shape: tuple[int, ...]) -> None:
    """Check that targets of the logits' shape are probabilities.

    Raises:
        TaskError: If they are whole numbers.
    """
    if not is_floating:
        raise TaskError(
            f"{name} takes class numbers, or a probability for each class; found whole numbers of "
            f"the logits' shape {shape}",
            "Of one-hot targets take .argmax(-1), or .astype('float32'); for several labels of one sample, "
            "use binary_cross_entropy.",
        )


def shape_of(name: str, value: Any) -> tuple[int, ...]:
    """Return the shape of what a loss or metric gave.

    Raises:
        TaskError: If it is not a tensor.
    """
    if not hasattr(value, "shape"):
        raise TaskError(
            f"{name} must give one value per sample, found a {type(value).__name__}",
            "Return a tensor of shape (samples,), without a mean over the samples.",
        )
    return tuple(value.shape)


def check_comparable(name: str, outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    """Check that outputs and targets have equal shapes, or differ by axes of length 1 only.

    Raises:
        TaskError: naming both shapes. Broadcasting them would compare every sample with every other.
    """
    if [n for n in outputs[1:] if n != 1] != [n for n in targets[1:] if n != 1]:
        raise TaskError(
            f"{name} compares the model's outputs {outputs} with targets {targets}: shapes differ"
        )


def _kinds_of(returned: Any) -> str:
    if not isinstance(returned, tuple | list):
        return f"a {type(returned).__name__}"
    return f"a {type(returned).__name__} of ({', '.join(type(part).__name__ for part in returned)})"


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

    To look for ignored targets among one per sample costs a tenth of a small model's step. It is done if the
    task has ``ignore_index``, or another loss, which may ignore some. Otherwise cross_entropy refuses them.

    Raises:
        TaskError: If ``ignore_index`` or ``class_weights`` cannot be used.
    """
    ignored = getattr(task, "ignore_index", IGNORE_INDEX)
    of_samples = hasattr(task, "ignore_index") or loss != "cross_entropy"
    if not isinstance(ignored, numbers.Integral) or isinstance(ignored, bool):
        raise TaskError(
            f"the task's ignore_index must be a class number that does not count, found {ignored!r}",
            f"Give an integer, or leave it out: the default is {IGNORE_INDEX}.",
        )
    given = getattr(task, "class_weights", None)
    if given is None:
        return Counting(int(ignored), of_samples, batch_weights=True)
    if loss != "cross_entropy":
        found = "a function of its own" if callable(loss) else loss
        raise TaskError(
            f"class_weights acts on the named loss cross_entropy; the task's loss is {found}",
            "Leave class_weights out, or return hvdtrain.Weighted(losses, weights) from the task's loss.",
        )
    return Counting(int(ignored), of_samples, _class_weights(given), batch_weights=True)


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
    field: str, value: Any, table: Mapping[str, Callable[..., Any]], options: Mapping[str, Any]
) -> Callable[..., Any]:
    """Return the function of a loss or metric: a user's own, or a named one with those options it takes."""
    if callable(value):
        own: Callable[..., Any] = value
        return own
    if not isinstance(value, str) or value not in table:
        close = difflib.get_close_matches(str(value), table, n=1)
        raise TaskError(
            f"the task's {field} is {value!r}, which is neither a function nor a known name",
            f"Did you mean {close[0]!r}?" if close else f"Known: {', '.join(sorted(table))}.",
        )
    taken = {name: given for name, given in options.items() if name != "class_axis" or value in OF_CLASSES}
    return _of_tensor(value, partial(table[value], **taken))


def _of_tensor(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a named loss or metric that takes the logits out of a model's structured output."""

    def of_outputs(outputs: Any, batch: Mapping[str, Any]) -> Any:
        if not hasattr(outputs, "shape"):
            outputs = _logits(name, outputs)
        return function(outputs, batch)

    return of_outputs


def _logits(name: str, outputs: Any) -> Any:
    """Return the logits of a structured output, as the models of Hugging Face transformers give it."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if hasattr(found, "shape"):
        return found
    raise TaskError(
        f"{name} takes a tensor or an output with .logits; the model gave a {type_name(outputs)}",
        "Write torch_loss(model, batch) or tf_loss, or a function (outputs, batch) in place of the name.",
        everywhere=True,
    )
