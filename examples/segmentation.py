"""The class of every pixel: a small U-Net on images of circles and squares, measured by mean IoU.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/segmentation.py:Shapes
    horovodrun -np 2 python -m hvdtrain --framework tf --task examples/segmentation.py:Shapes

Targets are class numbers (height, width): background, circle, square. The outermost pixels do not count, as
in data sets whose borders are not labelled.
"""

import numpy as np

SIZE, CLASSES, NO_CLASS = 32, 3, 255


class Shapes:
    """Tell background, circles and squares apart.

    Args:
        samples: number of images, of which a fifth is for evaluation.
        channels: channels of the U-Net's first level; the levels below have twice and four times as many.
    """

    loss = "cross_entropy"
    ignore_index = NO_CLASS
    metrics = {"mean_iou": "mean_iou", "accuracy": "accuracy"}
    defaults = {
        "epochs": 8,
        "global_batch_size": 16,
        "optimizer": "adamw",
        "learning_rate": 1e-2,
        "lr_schedule": "cosine",
        "warmup_epochs": 1,
        "eval_every": "2epoch",
        "keep_best": "mean_iou",
        "initial_parameters": "portable",
    }

    def __init__(self, samples=640, channels=8):
        self.channels = channels
        inputs, targets = drawn(samples)
        first = samples // 5
        self._train, self._eval = (inputs[first:], targets[first:]), (inputs[:first], targets[:first])

    def train_data(self):
        return self._train

    def eval_data(self):
        return self._eval

    def torch_model(self):
        import torch
        from torch import nn
        from torch.nn import functional as F

        width = self.channels

        class UNet(nn.Module):
            def __init__(self):
                super().__init__()

                def conv(inputs, outputs):
                    return nn.Conv2d(inputs, outputs, 3, padding=1)

                self.down1, self.down2 = conv(1, width), conv(width, 2 * width)
                self.bottom = conv(2 * width, 4 * width)
                self.up2, self.up1 = conv(6 * width, 2 * width), conv(3 * width, width)
                self.logits = nn.Conv2d(width, CLASSES, 1)

            def forward(self, x):
                one = F.silu(self.down1(x[:, None]))
                two = F.silu(self.down2(F.max_pool2d(one, 2)))
                x = F.silu(self.bottom(F.max_pool2d(two, 2)))
                x = F.silu(self.up2(torch.cat((F.interpolate(x, scale_factor=2), two), 1)))
                x = F.silu(self.up1(torch.cat((F.interpolate(x, scale_factor=2), one), 1)))
                return self.logits(x)  # (batch, classes, height, width)

        return UNet()

    def tf_model(self):
        import keras
        from keras import layers

        width = self.channels

        def conv(outputs, name):
            return layers.Conv2D(outputs, 3, padding="same", activation="silu", name=name)

        images = keras.Input((SIZE, SIZE))
        one = conv(width, "down1")(layers.Reshape((SIZE, SIZE, 1))(images))
        two = conv(2 * width, "down2")(layers.MaxPooling2D()(one))
        x = conv(4 * width, "bottom")(layers.MaxPooling2D()(two))
        x = conv(2 * width, "up2")(layers.Concatenate()([layers.UpSampling2D()(x), two]))
        x = conv(width, "up1")(layers.Concatenate()([layers.UpSampling2D()(x), one]))
        return keras.Model(images, layers.Conv2D(CLASSES, 1, name="logits")(x))  # (..., classes)


def drawn(samples):
    """Return noisy images, and the class of each pixel."""
    random = np.random.RandomState(0)
    rows, columns = np.mgrid[:SIZE, :SIZE]
    images = random.randn(samples, SIZE, SIZE).astype("float32") * 0.3
    classes = np.zeros((samples, SIZE, SIZE), "int64")
    for image, own in zip(images, classes, strict=True):
        for shape in (1, 2):
            row, column = random.randint(6, SIZE - 6, 2)
            radius = random.randint(4, 7)
            down, right = abs(rows - row), abs(columns - column)
            distance = np.hypot(down, right) if shape == 1 else np.maximum(down, right)
            own[distance <= radius] = shape
            image[distance <= radius] += 1
    for edge in (0, -1):
        classes[:, edge], classes[:, :, edge] = NO_CLASS, NO_CLASS
    return images, classes
