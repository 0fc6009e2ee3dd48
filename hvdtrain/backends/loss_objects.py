"""Loss objects of PyTorch and Keras as the named losses that compute the same for each sample."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from types import ModuleType
from typing import Any

from hvdtrain.data.unsupported import type_name
from hvdtrain.errors import TaskError
from hvdtrain.host.frameworks import FRAMEWORKS

_NAMES = {
    "torch": {
        "CrossEntropyLoss": "cross_entropy",
        "BCEWithLogitsLoss": "binary_cross_entropy",
        "MSELoss": "mse",
        "L1Loss": "mae",
    },
    "tf": {
        "SparseCategoricalCrossentropy": "cross_entropy",
        "CategoricalCrossentropy": "cross_entropy",
        "BinaryCrossentropy": "binary_cross_entropy",
        "MeanSquaredError": "mse",
        "MeanAbsoluteError": "mae",
    },
}
_HOLDERS = {
    "torch": "of a torch.nn.Module",
    "tf": "a keras.Variable of a keras.losses.Loss or of a built layer",
}
_PACKAGES = {"torch": "torch.nn.", "tf": "keras."}
_LOSS_OF_KERAS = ("keras.src.losses.loss", "Loss")
_DEPTH = 3  # how deep in a task's attributes a parameter is looked for
# settings that change nothing that a named loss would not do, with their values
_PLAIN = {
    "torch": {
        "reduction": ("mean", "none"),
        "ignore_index": (-100,),
        "weight": (None,),
        "pos_weight": (None,),
    },
    "tf": {
        "reduction": ("sum_over_batch_size", "mean", "mean_with_sample_weight", "none", None),
        "from_logits": (True,),
        "ignore_class": (None, -100),
        "axis": (-1,),
    },
}


def named_loss(loss: Any, framework: str) -> tuple[Any, dict[str, Any]]:
    """Return the name of what a loss object computes, and its options; other losses as they are.

    Args:
        loss: the task's loss.
        framework: "torch" or "tf".

    Raises:
        TaskError: If it is the name "model", or a library's loss that no named loss equals.
    """
    if isinstance(loss, str) and loss == "model":
        raise TaskError(
            "loss 'model' is not known: the loss that a model returns is a mean over the batch, but over "
            "how many samples or tokens is not known",
            f"Use loss = 'cross_entropy' with the column labels, or write {framework}_loss(model, batch) and "
            "return hvdtrain.Weighted(mean, number of samples or tokens) from it.",
        )
    kind = type(loss)
    for other, package in _PACKAGES.items():
        if other != framework and callable(loss) and _module(loss).startswith(package):
            known = _NAMES[other].get(kind.__name__)
            raise TaskError(
                f"the task's loss is {_described(loss)}, a loss of "
                f"{FRAMEWORKS[other].title}, and --framework is {framework}",
                f"Use loss = {known!r}, which both have."
                if known
                else f"Choose it in the task by framework, or use --framework {other}.",
            )
    if not callable(loss) or not _module(loss).startswith(_PACKAGES[framework]):
        is_of_keras = any((base.__module__, base.__name__) == _LOSS_OF_KERAS for base in kind.__mro__)
        return (_per_sample(loss) if is_of_keras else loss), {}
    name = _NAMES[framework].get(kind.__name__)
    if name is None:
        raise TaskError(
            f"the task's loss is {_described(loss)}; a loss takes (outputs, batch) and returns one value per "
            "sample",
            "Write def loss(self, outputs, batch) and call it there with reduction='none', with a mean over "
            f"all axes but the first. Known by name: {', '.join(sorted(set(_NAMES[framework].values())))}.",
        )
    settings = _settings(loss, framework)
    _check_plain(
        loss,
        framework,
        settings,
        f"Use loss = {name!r}, with the task's ignore_index and class_weights if they are meant, or write "
        f"{framework}_loss(model, batch).",
    )
    smoothing = settings.get("label_smoothing", 0.0)
    if smoothing and name != "cross_entropy":
        raise TaskError(f"the task's loss is {_described(loss)} with label_smoothing={smoothing}")
    return name, {"label_smoothing": smoothing} if smoothing else {}


def _check_plain(loss: Any, framework: str, settings: Mapping[str, Any], remedy: str) -> None:
    for field, plain in _PLAIN[framework].items():
        if not any(settings.get(field, plain[0]) is value or settings[field] == value for value in plain):
            raise TaskError(
                f"the task's loss is {_described(loss)} with {field}={settings[field]!r}; it can be taken "
                f"only with {field}={plain[0]!r}",
                remedy,
            )


def _per_sample(loss: Any) -> Callable[..., Any]:
    """Return the function of outputs and a batch that gives each sample's loss, of a Keras loss object.

    Raises:
        TaskError: If it does not take the mean over samples.
    """
    remedy = "Leave reduction out; the loss of a step is the mean over the samples."
    _check_plain(loss, "tf", {"reduction": loss.reduction}, remedy)
    each = object.__new__(type(loss))  # a copy with the same variables
    vars(each).update(vars(loss), reduction=None)

    return lambda outputs, batch: each(batch["targets"], outputs)


def check_foreign(task: Any, framework: str, found: Any, is_parameter: bool) -> None:
    """Refuse a parameter that a loss has a gradient for, and that is no part of the model.

    Args:
        task: the task.
        framework: "torch" or "tf".
        found: the parameter, or a tensor that is one if the task keeps it.
        is_parameter: whether it is a parameter wherever it is kept.

    Raises:
        TaskError: naming where the task has it.
    """
    name = _place_of(task, framework, lambda value: value is found or getattr(value, "_value", None) is found)
    if not (name or is_parameter):
        return
    freeze = "requires_grad_(False) on it, or on the network" if framework == "torch" else ""
    freeze = f"call {freeze}" if freeze else "set trainable = False of it, or of the network"
    raise TaskError(
        f"the loss has a gradient for {name or 'a parameter'}, of shape {tuple(found.shape)}, which is no "
        "part of the model: it would be neither trained nor saved",
        f"Make it a part of the model that {framework}_model() returns, or {_HOLDERS[framework]} that is the "
        "task's loss. If it is not to be trained, as in a network that a perceptual loss calls, "
        f"{freeze} that has it.",
        everywhere=True,
    )


def _place_of(task: Any, framework: str, is_it: Callable[[Any], bool]) -> str:
    """Return the name by which a task, or its loss, has a value; empty if it is not found."""
    places: list[tuple[str, Any, int]] = [(f"self.{name}", value, 0) for name, value in vars(task).items()]
    for method in (f"{framework}_loss", "loss"):
        function = inspect.unwrap(getattr(task, method, None) or (lambda: None))
        if inspect.isfunction(function) or inspect.ismethod(function):
            used = inspect.getclosurevars(function)
            places += [(name, value, 0) for name, value in {**used.globals, **used.nonlocals}.items()]
    seen: set[int] = set()
    for name, value, depth in places:  # which grows
        if is_it(value):
            return name
        if depth > _DEPTH or id(value) in seen or isinstance(value, ModuleType):
            continue
        seen.add(id(value))
        parts: Iterable[tuple[str, Any]] = ()
        if hasattr(value, "named_parameters"):
            parts = ((f".{path}", part) for path, part in value.named_parameters())
        elif isinstance(value, Mapping):
            parts = ((f"[{key!r}]", part) for key, part in value.items())
        elif isinstance(value, list | tuple):
            parts = ((f"[{place}]", part) for place, part in enumerate(value))
        elif hasattr(value, "trainable_variables"):
            parts = ((f".{getattr(part, 'path', part.name)}", part) for part in value.trainable_variables)
        elif hasattr(value, "__dict__"):
            parts = ((f".{key}", part) for key, part in vars(value).items())
        places += [(f"{name}{path}", part, depth + 1) for path, part in parts]
    return ""


def _settings(loss: Any, framework: str) -> Mapping[str, Any]:
    if framework == "tf":
        found: Mapping[str, Any] = loss.get_config()
        return found
    names = (*_PLAIN["torch"], "label_smoothing")
    return {name: getattr(loss, name) for name in names if hasattr(loss, name)}


def _module(loss: Any) -> str:
    """Return the module of a function, or of an object's class."""
    return str(getattr(loss, "__module__", None) or type(loss).__module__)


def _described(loss: Any) -> str:
    return f"{loss.__module__}.{loss.__name__}" if hasattr(loss, "__name__") else f"a {type_name(loss)}"
