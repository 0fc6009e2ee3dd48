"""What named losses and metrics take: where the classes stand, and which outputs and targets are refused."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.data.unsupported import type_name
from hvdtrain.errors import TaskError

# the named losses and metrics whose outputs have an axis of classes
OF_CLASSES = ("cross_entropy", "accuracy", "top5_accuracy")


# what takes one logit in place of one for each class
_OF_ONE_LOGIT = {"cross_entropy": "binary_cross_entropy", "accuracy": "binary_accuracy"}


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
        TaskError: If neither fits, or both do and the task does not say which; if there is one class.
    """
    axis = _fitting_axis(name, outputs, targets, class_axis)
    if outputs[axis] == 1:
        other = _OF_ONE_LOGIT.get(name)
        raise TaskError(
            f"{name} takes a logit for each class; the outputs {outputs} have one",
            "Give the model an output for each class" + (f", or use {other}." if other else "."),
        )
    return axis


def _fitting_axis(
    name: str, outputs: tuple[int, ...], targets: tuple[int, ...], class_axis: int | None
) -> int:
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


def class_axis_option(task: Any) -> dict[str, int]:
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


def check_comparable(name: str, outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    """Check that outputs and targets have equal shapes, or differ by axes of length 1 only.

    Raises:
        TaskError: naming both shapes. Broadcasting them would compare every sample with every other.
    """
    if [n for n in outputs[1:] if n != 1] != [n for n in targets[1:] if n != 1]:
        remedy = "Give the model as many outputs as a sample has targets."
        if len(outputs) == 2 and len([n for n in targets[1:] if n != 1]) == 0:
            remedy = (
                "A sample has one target: end the model in one output, such as nn.Linear(6, 1) or Dense(1)."
            )
            if name.startswith("binary"):
                remedy += " Of several classes, the loss is cross_entropy."
        raise TaskError(
            f"{name} compares the model's outputs {outputs} with targets {targets}: shapes differ", remedy
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


def logits_of(name: str, outputs: Any) -> Any:
    """Return the logits of a structured output, as the models of Hugging Face transformers give it."""
    found = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    if hasattr(found, "shape"):
        return found
    raise TaskError(
        f"{name} takes a tensor or an output with .logits; the model gave a {type_name(outputs)}",
        "Write torch_loss(model, batch) or tf_loss, or a function (outputs, batch) in place of the name.",
        everywhere=True,
    )


def of_tensor(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a named loss or metric that takes the logits out of a model's structured output."""

    def of_outputs(outputs: Any, batch: Mapping[str, Any]) -> Any:
        if not hasattr(outputs, "shape"):
            outputs = logits_of(name, outputs)
        return function(outputs, batch)

    return of_outputs
