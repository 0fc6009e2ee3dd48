"""What named losses and metrics take: where the classes stand, and which outputs and targets are refused."""

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.data.naming import has_class, type_name
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS

Shape = tuple[int, ...]
# classes of losses by the name that computes the same
_NAMES = {
    "torch": {
        "CrossEntropyLoss": "cross_entropy", "BCEWithLogitsLoss": "binary_cross_entropy",
        "MSELoss": "mse", "L1Loss": "mae",
    },
    "tf": {
        "SparseCategoricalCrossentropy": "cross_entropy", "CategoricalCrossentropy": "cross_entropy",
        "BinaryCrossentropy": "binary_cross_entropy", "MeanSquaredError": "mse", "MeanAbsoluteError": "mae",
    },
}  # fmt: skip
_HOLDERS = {
    "torch": "of a torch.nn.Module",
    "tf": "a keras.Variable of a keras.losses.Loss or of a built layer",
}
_PACKAGES = {"torch": "torch.nn.", "tf": "keras."}
# settings of loss objects with the values that a named loss has; one that an object lacks has the first
_PLAIN = {
    "reduction": ("mean", "none", None, "sum_over_batch_size", "mean_with_sample_weight"),
    "ignore_index": (-100,), "weight": (None,), "pos_weight": (None,), "from_logits": (True,),
    "ignore_class": (None, -100), "axis": (-1,),
}  # fmt: skip


def named_loss(loss: Any, framework: str, field: str = "loss") -> tuple[Any, dict[str, Any]]:
    """Return the name of what a loss object computes, and its options; other losses as they are."""
    if not callable(loss):
        return loss, {}
    kinds = loss.__mro__ if isinstance(loss, type) else (loss, *type(loss).__mro__)
    modules = [str(getattr(kind, "__module__", "")) for kind in kinds]
    described = f"the task's {field} is {getattr(loss, '__name__', type(loss).__name__)}"
    names, known = _NAMES[framework], ", ".join(sorted(set(_NAMES[framework].values())))
    for other in _PACKAGES.keys() - {framework}:
        if any(module.startswith(_PACKAGES[other]) for module in modules):
            raise TaskError(
                f"{described} of {FRAMEWORKS[other].title}, and --framework is {framework}",
                f"Use a name that both have ({known}), or choose it in the task by framework.",
            )
    if not modules[0].startswith(_PACKAGES[framework]):
        if field != "loss" or not has_class(loss, "keras.Loss"):
            return loss, {}
        described = f"the task's loss is {type(loss).__name__}"
        remedy = "Leave reduction out; the loss of a step is the mean over the samples."
        _check_plain(described, {"reduction": loss.reduction}, _PLAIN, remedy)
        each = object.__new__(type(loss))  # a copy with the same variables
        vars(each).update(vars(loss), reduction=None)
        return lambda outputs, batch: each(batch["targets"], outputs), {}
    name = names.get(type(loss).__name__)
    if name is None or field != "loss":
        raise TaskError(
            f"{described} of {FRAMEWORKS[framework].title}; a loss is a name, or takes (outputs, batch) and "
            "returns one value per sample",
            "Write def loss(self, outputs, batch) and call it there with reduction='none', with a mean over "
            f"all axes but the first. Known by name: {known}.",
        )
    settings = loss.get_config() if framework == "tf" else vars(loss) | loss._buffers
    smoothing = settings.get("label_smoothing", 0.0)
    allowed = _PLAIN if name == "cross_entropy" else _PLAIN | {"label_smoothing": (0.0,)}
    _check_plain(
        described,
        {key: settings.get(key, values[0]) for key, values in allowed.items()},
        allowed,
        f"Use loss = {name!r}, with the task's ignore_index and class_weights if they are meant, or write "
        f"{framework}_loss(model, batch).",
    )
    return name, {"label_smoothing": smoothing} if smoothing else {}


def _check_plain(described: str, settings: Mapping[str, Any], allowed: Any, remedy: str) -> None:
    for key, value in settings.items():
        if not any(value is one or value == one for one in allowed[key]):
            only = f"it can be taken only with {key}={allowed[key][0]!r}"
            raise TaskError(f"{described} with {key}={value!r}; {only}", remedy)


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
        f"Make it a part of the model that {framework}_model() returns, or {_HOLDERS[framework]} that is the "
        "task's loss. If it is not to be trained, as in a network that a perceptual loss calls, "
        f"{freeze}, or of the network that has it.",
        everywhere=True,
    )


# the named losses and metrics whose outputs have an axis of classes
OF_CLASSES = ("cross_entropy", "accuracy", "top5_accuracy")
_OF_ONE_LOGIT = {"cross_entropy": "binary_cross_entropy", "accuracy": "binary_accuracy"}


@functools.lru_cache
def class_axis_of(name: str, outputs: Shape, targets: Shape, class_axis: int | None = None) -> int:
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
    pairs = zip(rest, targets, strict=False)
    return len(rest) == len(targets) and all(None in pair or pair[0] == pair[1] for pair in pairs)


def class_axis_option(task: Any) -> dict[str, int]:
    """Return the task's ``class_axis`` as an option of the losses and metrics; nothing if it has none."""
    class_axis: int | None = getattr(task, "class_axis", None)
    if class_axis not in (None, 1, -1):
        raise TaskError(
            f"the task's class_axis is {class_axis!r}; it must be -1 for outputs (batch, ..., classes) or 1 "
            "for outputs (batch, classes, ...)"
        )
    return {} if class_axis is None else {"class_axis": class_axis}


def check_comparable(name: str, outputs: Shape, targets: Shape) -> None:
    """Check that outputs and targets have equal shapes, or differ by axes of length 1 only."""
    if [n for n in outputs[1:] if n != 1] != [n for n in targets[1:] if n != 1]:
        of_classes = " Of several classes, the loss is cross_entropy." * name.startswith("binary")
        raise TaskError(
            f"{name} compares the model's outputs {outputs} with targets {targets}: shapes differ",
            "Give the model as many outputs as a sample has targets: of one target it ends in one output, "
            f"such as nn.Linear(6, 1) or Dense(1).{of_classes}",
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
        return function(outputs if hasattr(outputs, "shape") else logits_of(name, outputs), batch)

    return of_outputs
