"""ResNet-18, 34 and 50 for images, with the names of torchvision's parameters.

Source: K. He et al., "Deep Residual Learning for Image Recognition", 2016; version 1.5, in which
the 3x3 convolution of a bottleneck has the stride. Inputs are (batch, height, width,
channels), outputs (batch, classes) logits. With the ImageNet stem and 1,000 classes they have
11,689,512, 21,797,672 and 25,557,032 parameters.

Both frameworks keep a moving average of the biased variance of the batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hvdtrain.errors import TaskError
from hvdtrain.models.block import Block, keras_blocks, keras_ends, keras_layers

BLOCKS = {18: (2, 2, 2, 2), 34: (3, 4, 6, 3), 50: (3, 4, 6, 3)}
CHANNELS = (64, 128, 256, 512)
EPSILON, MOMENTUM = 1e-5, 0.1  # MOMENTUM: weight of the new value in a moving average


@dataclass(frozen=True)
class _Block:
    """The layers of a block, in either framework."""

    inputs: int  # number of input channels
    outputs: int  # number of output channels
    stride: int  # factor by which height and width shrink
    convolutions: tuple[tuple[int, int, int], ...]  # output channels, size and stride of each

    @property
    def projects(self) -> bool:
        """Whether the shortcut has a convolution of its own."""
        return self.stride > 1 or self.inputs != self.outputs


def torch_model(
    image_shape: tuple[int, int, int],
    classes: int,
    depth: int = 18,
    stem: str = "cifar",
    activation: str = "relu",
) -> Any:
    """Return the PyTorch model for images of a shape (height, width, channels)."""
    from torch import nn
    from torch.nn import functional as F

    stages = _stages(depth, stem, activation)
    activate = {"relu": F.relu, "silu": F.silu}[activation]
    make_block, conv, norm = _torch_parts(activate)

    class ResNet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv1 = conv(image_shape[2], CHANNELS[0], *((3, 1) if stem == "cifar" else (7, 2)))
            self.bn1 = norm(CHANNELS[0])
            self.layer1, self.layer2, self.layer3, self.layer4 = (
                nn.Sequential(*map(make_block, blocks)) for blocks in stages
            )
            self.fc = nn.Linear(stages[-1][-1].outputs, classes)

        def forward(self, images: Any) -> Any:
            x = self.layer4(self.layer3(self.layer2(self.layer1(self.begin(images)))))
            return self.predict(x)

        def begin(self, images: Any) -> Any:
            x = images.permute(0, 3, 1, 2)  # a view, in memory channels_last, which suits convolutions
            x = activate(self.bn1(self.conv1(x)))
            return F.max_pool2d(x, 3, 2, padding=1) if stem == "imagenet" else x

        def predict(self, x: Any) -> Any:
            return self.fc(x.mean((2, 3)))

    return ResNet()


def torch_blocks(model: Any) -> list[Any]:
    """Return the blocks of a PyTorch model: the first convolution, the residual blocks, the last layer."""
    layers = (model.layer1, model.layer2, model.layer3, model.layer4)
    residual = [block for layer in layers for block in layer]
    return [Block(model.begin, model.conv1, model.bn1), *residual, Block(model.predict, model.fc)]


def tf_blocks(model: Any) -> list[Any]:
    """Return the blocks of a Keras model: the first convolution, the residual blocks, the last layer."""
    return keras_blocks(model, [block for i in range(1, 5) for block in keras_layers(model, f"layer{i}")])


def _torch_parts(activate: Callable[[Any], Any]) -> tuple[Any, Any, Any]:
    """Return the functions that make blocks, convolutions and batch norms."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class BatchNorm(nn.BatchNorm2d):
        """Keeps the average of the biased variance, as Keras does."""

        synchronises = True  # hvdtrain's synchronised batch norm keeps the same average

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                return super().forward(x)
            assert self.running_var is not None  # the layer keeps statistics
            averaged, count = self.running_var.clone(), x.numel() // x.shape[1]
            x = F.batch_norm(x, self.running_mean, averaged, self.weight, self.bias, True, MOMENTUM, EPSILON)
            with torch.no_grad():  # averaged = (1 - momentum) * before + momentum * unbiased
                self.running_var.mul_((1 - MOMENTUM) / count).add_(averaged, alpha=1 - 1 / count)
            return x

    def norm(channels: int) -> nn.Module:
        return BatchNorm(channels, eps=EPSILON, momentum=MOMENTUM)

    def conv(inputs: int, outputs: int, size: int, stride: int) -> nn.Module:
        return nn.Conv2d(inputs, outputs, size, stride, padding=size // 2, bias=False)

    class Residual(nn.Module):
        recompute = True

        def __init__(self, plan: _Block) -> None:
            super().__init__()
            self.count, inputs = len(plan.convolutions), plan.inputs
            for i, (outputs, size, stride) in enumerate(plan.convolutions, 1):
                self.add_module(f"conv{i}", conv(inputs, outputs, size, stride))
                self.add_module(f"bn{i}", norm(outputs))
                inputs = outputs
            self.downsample = None
            if plan.projects:
                projection = conv(plan.inputs, plan.outputs, 1, plan.stride)
                self.downsample = nn.Sequential(projection, norm(plan.outputs))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shortcut = x if self.downsample is None else self.downsample(x)
            for i in range(1, self.count + 1):
                x = self.get_submodule(f"bn{i}")(self.get_submodule(f"conv{i}")(x))
                x = activate(x + shortcut if i == self.count else x)
            return x

    return Residual, conv, norm


def tf_model(
    image_shape: tuple[int, int, int],
    classes: int,
    depth: int = 18,
    stem: str = "cifar",
    activation: str = "relu",
) -> Any:
    """Return the Keras twin; the arguments are those of :func:`torch_model`."""
    import keras
    from keras import layers, ops

    stages = _stages(depth, stem, activation)
    images = keras.Input(image_shape)
    x = _keras_conv(images, CHANNELS[0], *((3, 1) if stem == "cifar" else (7, 2)), name="conv1")
    x = layers.Activation(activation)(_keras_norm(x, "bn1"))
    if stem == "imagenet":
        # PyTorch pads a maximum with -inf; no activation is below -1
        x = ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=-1.0)
        x = layers.MaxPooling2D(3, 2)(x)
    entering = x
    for i, blocks in enumerate(stages, 1):
        below = y = keras.Input(x.shape[1:])
        for j, plan in enumerate(blocks):
            y = _keras_block(y.shape[1:], plan, activation, str(j))(y)
        x = keras.Model(below, y, name=f"layer{i}")(x)
    logits = layers.Dense(classes, name="fc")(layers.GlobalAveragePooling2D()(x))
    return keras_ends(keras.Model(images, logits), entering, x)


def _keras_block(shape: tuple[int, ...], plan: _Block, activation: str, name: str) -> Any:
    import keras
    from keras import layers

    inputs = x = shortcut = keras.Input(shape)
    if plan.projects:
        below = keras.Input(shape)
        projected = _keras_norm(_keras_conv(below, plan.outputs, 1, plan.stride, name="0"), "1")
        shortcut = keras.Model(below, projected, name="downsample")(inputs)
    for i, (outputs, size, stride) in enumerate(plan.convolutions, 1):
        x = _keras_norm(_keras_conv(x, outputs, size, stride, name=f"conv{i}"), f"bn{i}")
        x = layers.Activation(activation)(layers.Add()([x, shortcut]) if i == len(plan.convolutions) else x)
    block = keras.Model(inputs, x, name=name)
    block.recompute = True
    return block


def _keras_conv(x: Any, channels: int, size: int, stride: int, name: str) -> Any:
    from keras import layers

    if stride > 1 and size > 1:  # "same" would pad the right side alone
        x = layers.ZeroPadding2D(size // 2)(x)
    padding = "same" if stride == 1 else "valid"
    return layers.Conv2D(channels, size, stride, padding=padding, use_bias=False, name=name)(x)


def _keras_norm(x: Any, name: str) -> Any:
    from keras import layers

    return layers.BatchNormalization(epsilon=EPSILON, momentum=1 - MOMENTUM, name=name)(x)


def _stages(depth: int, stem: str, activation: str) -> list[list[_Block]]:
    known = depth in BLOCKS and stem in ("cifar", "imagenet") and activation in ("relu", "silu")
    if not known:
        raise TaskError(
            f"there is no ResNet of depth {depth!r}, stem {stem!r} and activation {activation!r}",
            "Depth is 18, 34 or 50; stem is 'cifar' or 'imagenet'; activation is 'relu' or 'silu'.",
        )
    stages: list[list[_Block]] = []
    inputs = CHANNELS[0]
    for i, (channels, blocks) in enumerate(zip(CHANNELS, BLOCKS[depth], strict=True)):
        stages.append([])
        for j in range(blocks):
            stride = 2 if i and not j else 1
            if depth < 50:
                convolutions: Any = ((channels, 3, stride), (channels, 3, 1))
            else:  # a bottleneck
                convolutions = ((channels, 1, 1), (channels, 3, stride), (4 * channels, 1, 1))
            outputs = convolutions[-1][0]
            stages[-1].append(_Block(inputs, outputs, stride, convolutions))
            inputs = outputs
    return stages
