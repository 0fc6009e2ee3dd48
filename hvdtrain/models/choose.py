"""Built-in models, chosen by name, and the methods of a task whose model is one of them."""

from types import ModuleType
from typing import Any, ClassVar, Literal, get_args

from hvdtrain.errors import TaskError
from hvdtrain.models import convnet, mlp, resnet

ImageModel = Literal["mlp", "convnet", "resnet18", "resnet34", "resnet50"]
NAMES: tuple[str, ...] = get_args(ImageModel)
_CIFAR_BELOW = 64  # pixels of the shorter side: the stem does not shrink smaller images


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


def module_and_sizes(
    name: str, image_shape: tuple[int, int, int], classes: int, activation: str = "relu"
) -> tuple[ModuleType, dict[str, Any]]:
    """Return what makes a model for images (height, width, channels); the activation is of ResNets."""
    if name not in NAMES:
        raise TaskError(f"there is no model {name!r} for images", f"Choose one of {', '.join(NAMES)}.")
    height, width, _ = image_shape
    sizes: dict[str, Any] = {"classes": classes, "image_shape": image_shape}
    if name == "mlp":
        return mlp, {"classes": classes, "input_shape": image_shape}
    if name != "convnet":
        stem = "cifar" if min(height, width) < _CIFAR_BELOW else "imagenet"
        depth = int(name.removeprefix("resnet"))
        return resnet, {**sizes, "depth": depth, "stem": stem, "activation": activation}
    if height % 2 or width % 2:
        raise TaskError(
            f"convnet: height and width of the images must be even; these are {height}x{width}",
            "Crop or resize them, or use resnet18.",
        )
    return convnet, sizes


def image_model(framework: str, name: str, image_shape: tuple[int, int, int], classes: int) -> Any:
    """Return a model for images, one of ``NAMES``, for "torch" or "tf"."""
    module, sizes = module_and_sizes(name, image_shape, classes)
    return module.torch_model(**sizes) if framework == "torch" else module.tf_model(**sizes)
