"""Built-in models, chosen by name, and the methods of a task whose model is one of them."""

from types import ModuleType
from typing import Any

from hvdtrain.errors import TaskError
from hvdtrain.models import convnet, mlp, resnet

NAMES = ("mlp", "convnet", "resnet18", "resnet34", "resnet50")  # of models for images
_CIFAR_BELOW = 64  # pixels of the shorter side: the stem does not shrink smaller images


class BuiltIn:
    """A task whose models are those of a module of this package."""

    def _built_in(self) -> tuple[Any, dict[str, Any]]:
        """Return the module, and the arguments of its ``torch_model`` and ``tf_model``."""
        raise NotImplementedError

    def torch_model(self) -> Any:
        """Return the PyTorch model."""
        module, sizes = self._built_in()
        return module.torch_model(**sizes)

    def torch_blocks(self, model: Any) -> list[Any]:
        """Return the blocks of the PyTorch model."""
        blocks: list[Any] = self._built_in()[0].torch_blocks(model)
        return blocks

    def tf_model(self) -> Any:
        """Return its Keras twin."""
        module, sizes = self._built_in()
        return module.tf_model(**sizes)

    def tf_blocks(self, model: Any) -> list[Any]:
        """Return the blocks of the Keras model."""
        blocks: list[Any] = self._built_in()[0].tf_blocks(model)
        return blocks


def image_module(name: str) -> ModuleType:
    """Return the module of a model for images, by its name, which is one of ``NAMES``."""
    return {"mlp": mlp, "convnet": convnet}.get(name, resnet)


def image_sizes(
    name: str, image_shape: tuple[int, int, int], classes: int, activation: str = "relu"
) -> dict[str, Any]:
    """Return the sizes of a model that classifies images of a shape (height, width, channels).

    ``activation`` is that of ResNets, "relu" or "silu"; the other models use SiLU.
    """
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
