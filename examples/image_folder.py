"""Classify the pictures of a folder: ResNet-18 of torchvision, and MobileNet of keras.applications.

    python examples/image_folder.py shapes
    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/image_folder.py:ResNet
    horovodrun -np 2 python -m hvdtrain --framework tf --task examples/image_folder.py:MobileNet

The first command draws a folder of pictures. ``--set task_options.path=FOLDER`` names one of your own, with a
sub-folder for each class: ``train/CLASS/*.jpg`` and ``val/CLASS/*.jpg``.

ResNet needs torchvision: ``pip install torchvision``. If ``import torchvision`` ends with
``operator torchvision::nms does not exist``, see docs/examples.md.
"""

import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

from hvdtrain.data import Augmented, Flip

SIDE = 64  # pixels of a picture as the models see it


class Folder:
    """What both tasks have in common.

    Args:
        path: the folder.
    """

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}
    defaults = {
        "epochs": 5,
        "batch_size": 16,
        "learning_rate": 0.02,
        "warmup_epochs": 1,
        "lr_schedule": "cosine",
    }

    def __init__(self, path="shapes"):
        self.path = Path(path).expanduser()
        self.classes = sorted(folder.name for folder in (self.path / "train").iterdir() if folder.is_dir())


class ResNet(Folder):
    """A model, a data set and transforms of torchvision."""

    def train_data(self):
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        # these draw from PyTorch's global generator: two runs see different crops (docs/tasks.md)
        return ImageFolder(
            self.path / "train",
            v2.Compose([v2.RandomResizedCrop(SIDE), v2.RandomHorizontalFlip(), *as_tensor()]),
        )

    def eval_data(self):
        from torchvision.datasets import ImageFolder
        from torchvision.transforms import v2

        return ImageFolder(
            self.path / "val", v2.Compose([v2.Resize(SIDE), v2.CenterCrop(SIDE), *as_tensor()])
        )

    def torch_model(self):
        from torchvision.models import resnet18

        return resnet18(num_classes=len(self.classes))


class MobileNet(Folder):
    """A model and the image loading of Keras.

    With random weights, evaluations stay at chance for some hundred steps, as they do with ``fit``: the
    moving statistics of the model's 27 batch norms follow slowly.
    """

    def train_data(self):
        return Augmented(Pictures(self.path / "train", self.classes), [Flip()])

    def eval_data(self):
        return Pictures(self.path / "val", self.classes)

    def tf_model(self):
        import keras

        # without activation: the loss takes logits
        return keras.applications.MobileNet(
            (SIDE, SIDE, 3), alpha=0.25, weights=None, classes=len(self.classes), classifier_activation=None
        )


class Pictures:
    """Pictures and the numbers of their classes.

    It takes the place of ``image_dataset_from_directory``, which returns a stream.
    """

    def __init__(self, folder, classes):
        self.samples = [
            (path, label) for label, name in enumerate(classes) for path in sorted((folder / name).iterdir())
        ]

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        from keras.applications.mobilenet import preprocess_input
        from keras.utils import img_to_array, load_img

        path, label = self.samples[index]
        picture = load_img(path, target_size=(SIDE, SIDE), interpolation="bilinear", keep_aspect_ratio=True)
        return preprocess_input(img_to_array(picture)), label


def as_tensor():
    """Return the transforms that make a normalized tensor of a picture."""
    import torch
    from torchvision.transforms import v2

    mean, deviation = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
    return v2.ToImage(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(mean, deviation)


def draw_shapes(folder, train=40, evaluation=20):
    """Draw pictures of three shapes in colours, of different sizes and proportions."""
    draw = random.Random(0)
    for part, count in (("train", train), ("val", evaluation)):
        for shape in ("circle", "cross", "square"):
            place = Path(folder) / part / shape
            place.mkdir(parents=True)
            for number in range(count):
                one_picture(shape, draw).save(place / f"{number:03d}.jpg")


def one_picture(shape, draw):
    width, height = draw.randrange(70, 100), draw.randrange(70, 100)
    picture = Image.new("RGB", (width, height), tuple(draw.randrange(128) for _ in range(3)))
    pen = ImageDraw.Draw(picture)
    radius, colour = draw.randrange(15, 25), tuple(draw.randrange(160, 256) for _ in range(3))
    x, y = draw.randrange(radius, width - radius), draw.randrange(radius, height - radius)
    if shape == "cross":
        pen.line((x - radius, y, x + radius, y), colour, 6)
        pen.line((x, y - radius, x, y + radius), colour, 6)
    else:
        outline = pen.ellipse if shape == "circle" else pen.rectangle
        outline((x - radius, y - radius, x + radius, y + radius), fill=colour)
    return picture


if __name__ == "__main__":
    draw_shapes(sys.argv[1])
