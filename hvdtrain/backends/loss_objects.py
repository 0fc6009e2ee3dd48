"""Loss objects of PyTorch and Keras as the named losses that compute the same for each sample."""

from collections.abc import Mapping
from typing import Any

from hvdtrain.data.unsupported import type_name
from hvdtrain.errors import TaskError
from hvdtrain.frameworks import FRAMEWORKS

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
_PACKAGES = {"torch": "torch.nn.", "tf": "keras."}
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
        return loss, {}
    name = _NAMES[framework].get(kind.__name__)
    if name is None:
        raise TaskError(
            f"the task's loss is {_described(loss)}; a loss takes (outputs, batch) and returns one value per "
            "sample",
            "Write def loss(self, outputs, batch) and call it there with reduction='none', with a mean over "
            f"all axes but the first. Known by name: {', '.join(sorted(set(_NAMES[framework].values())))}.",
        )
    settings = _settings(loss, framework)
    for field, plain in _PLAIN[framework].items():
        if not any(settings.get(field, plain[0]) is value or settings[field] == value for value in plain):
            raise TaskError(
                f"the task's loss is {_described(loss)} with {field}={settings[field]!r}; it can be taken "
                f"only with {field}={plain[0]!r}",
                f"Use loss = {name!r}, with the task's ignore_index and class_weights if they are meant, or "
                f"write {framework}_loss(model, batch).",
            )
    smoothing = settings.get("label_smoothing", 0.0)
    if smoothing and name != "cross_entropy":
        raise TaskError(f"the task's loss is {_described(loss)} with label_smoothing={smoothing}")
    return name, {"label_smoothing": smoothing} if smoothing else {}


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
