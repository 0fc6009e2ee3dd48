"""Built-in models, chosen by name, and the methods of a task whose model is one of them."""

from types import ModuleType
from typing import Any, ClassVar

from hvdtrain.errors import TaskError
from hvdtrain.models import convnet, mlp, resnet

NAMES = ("mlp", "convnet", "resnet18", "resnet34", "resnet50")  # of models for images
_CIFAR_BELOW = 64  # pixels of the shorter side: the stem does not shrink smaller images


# what the tasks with images train with
IMAGE_DEFAULTS = {
    "epochs": 15,
    "batch_size": 32,
    "learning_rate": 0.03,
    "weight_decay": 5e-4,
    "warmup_epochs": 1,
    "clip_norm": 1.0,
    "lr_schedule": "cosine",
    "initial_parameters": "portable",
}


class BuiltIn:
    """A task that classifies with a model of a module of this package."""

    loss = "cross_entropy"
    metrics: ClassVar = {"accuracy": "accuracy"}

    def _built_in(self) -> tuple[Any, dict[str, Any]]:
        """Return the module, and the arguments of its ``torch_model`` and ``tf_model``."""
        raise NotImplementedError

    def torch_model(self) -> Any:
        """Return the PyTorch model."""
        module, sizes = self._built_in()
        return module.torch_model(**sizes)

    def torch_blocks(self, model: Any) -> list[Any]:
        """Return the blocks of the PyTorch model."""
        return list(self._built_in()[0].torch_blocks(model))

    def tf_model(self) -> Any:
        """Return its Keras twin."""
        module, sizes = self._built_in()
        return module.tf_model(**sizes)

    def tf_blocks(self, model: Any) -> list[Any]:
        """Return the blocks of the Keras model."""
        return list(self._built_in()[0].tf_blocks(model))


def image_module(name: str) -> ModuleType:
    """Return the module of a model for images, by its name, which is one of ``NAMES``."""
    return {"mlp": mlp, "convnet": convnet}.get(name, resnet)


def image_sizes(
    name: str, image_shape: tuple[int, int, int], classes: int, activation: str = "relu"
) -> dict[str, Any]:
    """Return the sizes of a model for images (height, width, channels); the activation is of ResNets."""
    if name not in NAMES:
        raise TaskError(f"there is no model {name!r} for images", f"Choose one of {', '.join(NAMES)}.")
    height, width, _ = image_shape
    if name == "mlp":
        return {"classes": classes, "input_shape": image_shape}
    sizes: dict[str, Any] = {"classes": classes, "image_shape": image_shape}
    if name != "convnet":
        stem = "cifar" if min(height, width) < _CIFAR_BELOW else "imagenet"
        return {**sizes, "depth": int(name.removeprefix("resnet")), "stem": stem, "activation": activation}
    if height % 2 or width % 2:
        raise TaskError(
            f"convnet: height and width of the images must be even; these are {height}x{width}",
            "Crop or resize them, or use resnet18.",
        )
    return sizes


def image_model(framework: str, name: str, image_shape: tuple[int, int, int], classes: int) -> Any:
    """Return a model of ``image_sizes`` for "torch" or "tf"."""
    sizes, module = image_sizes(name, image_shape, classes), image_module(name)
    return module.torch_model(**sizes) if framework == "torch" else module.tf_model(**sizes)
