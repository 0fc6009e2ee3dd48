"""Models for images, chosen by name."""

from typing import Any

from hvdtrain.errors import TaskError
from hvdtrain.models import convnet, mlp, resnet

NAMES = ("mlp", "convnet", "resnet18", "resnet34", "resnet50")
_CIFAR_BELOW = 64  # pixels of the shorter side: the stem does not shrink smaller images


def image_blocks(framework: str, name: str, model: Any) -> list[Any]:
    """Return the blocks of a model.

    Args:
        framework: "torch" or "tf".
        name: one of ``NAMES``.
        model: what ``image_model`` returned for it.
    """
    module: Any = {"mlp": mlp, "convnet": convnet}.get(name, resnet)
    blocks: list[Any] = getattr(module, f"{framework}_blocks")(model)
    return blocks


def image_model(
    framework: str, name: str, image_shape: tuple[int, int, int], classes: int, activation: str = "relu"
) -> Any:
    """Return a model that classifies images.

    Args:
        framework: "torch" or "tf".
        name: one of ``NAMES``.
        image_shape: height, width, channels.
        classes: number of classes.
        activation: activation of ResNets, "relu" or "silu"; the other models use SiLU.

    Raises:
        TaskError: If there is no model of that name, or it cannot take images of this shape.
    """
    if name not in NAMES:
        raise TaskError(f"there is no model {name!r} for images", f"Choose one of {', '.join(NAMES)}.")
    height, width, _ = image_shape
    options: dict[str, Any] = {"classes": classes}
    if name == "mlp":
        module: Any = mlp
        options["input_shape"] = image_shape
    elif name == "convnet":
        if height % 2 or width % 2:
            raise TaskError(
                f"convnet: height and width of the images must be even; these are {height}x{width}",
                "Crop or resize them, or use resnet18.",
            )
        module, options["image_shape"] = convnet, image_shape
    else:
        stem = "cifar" if min(height, width) < _CIFAR_BELOW else "imagenet"
        module, options = (
            resnet,
            {
                **options,
                "image_shape": image_shape,
                "depth": int(name.removeprefix("resnet")),
                "stem": stem,
                "activation": activation,
            },
        )
    build = module.torch_model if framework == "torch" else module.tf_model
    return build(**options)
