"""What named losses and metrics take: where the classes stand, and which outputs and targets are refused."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.data.naming import type_name
from hvdtrain.errors import TaskError

# classes of losses, of both frameworks, by the name that computes the same
_NAMES = {
    "CrossEntropyLoss": "cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy",
    "MSELoss": "mse",
    "L1Loss": "mae",
    "SparseCategoricalCrossentropy": "cross_entropy",
    "CategoricalCrossentropy": "cross_entropy",
    "BinaryCrossentropy": "binary_cross_entropy",
    "MeanSquaredError": "mse",
    "MeanAbsoluteError": "mae",
}


def check_loss(field: str, loss: Any) -> None:
    """Refuse losses of PyTorch, and objects of Keras: they take other arguments than a task's functions."""
    kinds = loss.__mro__ if isinstance(loss, type) else (loss, *type(loss).__mro__)
    modules = [str(getattr(kind, "__module__", "")) for kind in kinds]
    is_of_keras = any(module.startswith("keras.") for module in modules)
    if not (is_of_keras or modules[0].startswith("torch.nn.")):
        return
    kind = getattr(loss, "__name__", type(loss).__name__)
    name = f"Use loss = {_NAMES[kind]!r}, or write" if kind in _NAMES else "Write"
    raise TaskError(
        f"the task's {field} is {kind} of {'Keras' if is_of_keras else 'PyTorch'}; a loss is a name or a "
        "function of (outputs, batch) that returns one value per sample",
        f"{name} def loss(self, outputs, batch) and call it there for each sample, with reduction='none' in "
        "PyTorch and reduction=None in Keras, and a mean over all axes but the first.",
    )


def check_foreign(task: Any, framework: str, found: Any, is_parameter: bool) -> None:
    """Refuse a parameter that a loss has a gradient for, and that is no part of the model."""
    held = vars(task).items()
    name = next((f"self.{k}" for k, v in held if v is found or getattr(v, "_value", None) is found), "")
    if not (name or is_parameter):
        return
    freeze = "call requires_grad_(False) on it" if framework == "torch" else "set trainable = False of it"
    raise TaskError(
        f"the loss has a gradient for {name or 'a parameter'}, of shape {tuple(found.shape)}, which is no "
        "part of the model: it would be neither trained nor saved",
        f"Make it a part of the model that {framework}_model() returns. If it is not to be trained, as in a "
        f"network that a perceptual loss calls, {freeze}, or of the network that has it.",
        everywhere=True,
    )


# the named losses and metrics whose outputs have an axis of classes
OF_CLASSES = ("cross_entropy", "accuracy", "top5_accuracy")


# what takes one logit in place of one for each class
_OF_ONE_LOGIT = {"cross_entropy": "binary_cross_entropy", "accuracy": "binary_accuracy"}


@functools.lru_cache
def class_axis_of(
    name: str, outputs: tuple[int, ...], targets: tuple[int, ...], class_axis: int | None = None
) -> int:
    """Return the axis of the classes in logits: the last one, or 1 as in PyTorch's convolutions."""
    last = len(outputs) - 1
    given = None if class_axis is None or last < 1 else class_axis % len(outputs)
    fitting = [axis for axis in dict.fromkeys((last, 1)) if last >= 1 and _fits(outputs, targets, axis)]
    if None in outputs:  # TensorFlow does not know all of it while it traces the step
        axis = (*fitting, last)[0] if given is None else given
    elif fitting and (given in fitting or (given is None and len(fitting) == 1)):
        axis = fitting[0] if given is None else given
    else:
        shapes = f"outputs {outputs} and targets {targets}"
        if fitting and given is None:
            raise TaskError(
                f"{name} cannot tell which axis of the model's outputs holds the classes: {shapes}",
                "Set class_axis in the task: -1 (batch, ..., classes) or 1 (batch, classes, ...).",
            )
        raise TaskError(
            f"{name} takes logits (batch, ..., classes) or (batch, classes, ...) and class numbers "
            f"(batch, ...), or probabilities of the logits' shape; found {shapes}"
            + ("" if class_axis is None else f" with class_axis {class_axis}")
        )
    if outputs[axis] == 1:
        other = _OF_ONE_LOGIT.get(name)
        raise TaskError(
            f"{name} takes a logit for each class; the outputs {outputs} have one",
            "Give the model an output for each class" + (f", or use {other}." if other else "."),
        )
    return axis


def _fits(outputs: tuple[int | None, ...], targets: tuple[int | None, ...], axis: int) -> bool:
    """Return whether targets can belong to outputs with classes on an axis, as far as shapes are known."""
    rest = outputs[:axis] + outputs[axis + 1 :]
    if outputs == targets or (axis == len(rest) and (*rest, 1) == targets):
        return True
    return len(rest) == len(targets) and all(
        None in (a, b) or a == b for a, b in zip(rest, targets, strict=True)
    )


def class_axis_option(task: Any) -> dict[str, int]:
    """Return the task's ``class_axis`` as an option of the losses and metrics; nothing if it has none."""
    class_axis: int | None = getattr(task, "class_axis", None)
    if class_axis not in (None, 1, -1):
        raise TaskError(
            f"the task's class_axis is {class_axis!r}; it must be -1 for outputs (batch, ..., classes) or 1 "
            "for outputs (batch, classes, ...)"
        )
    return {} if class_axis is None else {"class_axis": class_axis}


def check_class_numbers(name: str, is_floating: bool, shape: tuple[int, ...]) -> None:
    """Check that targets of the logits' shape are probabilities."""
    if not is_floating:
        raise TaskError(
            f"{name} takes class numbers, or a probability for each class; found whole numbers of "
            f"the logits' shape {shape}",
            "Of one-hot targets take .argmax(-1), or .astype('float32'); for several labels of one sample, "
            "use binary_cross_entropy.",
        )


def check_comparable(name: str, outputs: tuple[int, ...], targets: tuple[int, ...]) -> None:
    """Check that outputs and targets have equal shapes, or differ by axes of length 1 only."""
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
