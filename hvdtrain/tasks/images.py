"""Classification of images from files: IDX, an image folder or npz."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from hvdtrain.data.augment import Crop, Flip, RandomResizedCrop, Size, Transform
from hvdtrain.data.eval_sets import first_set
from hvdtrain.data.images import arrays, folder, sources
from hvdtrain.errors import DataError, TaskError
from hvdtrain.models.choose import BuiltIn, ImageModel, module_and_sizes
from hvdtrain.tasks import _options as options

_WANTED = "Expected: IDX files (train-images-idx3-ubyte, ...), an npz file, or a folder for each class."


def find(path: Path, form: str) -> sources.Found:
    """Open the images in a folder or file."""
    with sources.reading(path):
        if not path.exists():
            raise DataError(f"{path} does not exist (looked in {Path.cwd()})", "Correct task_options.path.")
        if not path.is_dir() and (form not in ("auto", "npz") or path.suffix != ".npz"):
            raise DataError(f"{path} is neither a folder nor an npz file", _WANTED)
        archives = [path] if path.is_file() else sorted(path.glob("*.npz"))
        if form == "idx" or (form == "auto" and path.is_dir() and arrays.idx_names_in(path)):
            return arrays.find_idx(path)
        if form == "folder" or (form == "auto" and not archives and folder.folders_in(path)):
            return folder.find(path)
        if len(archives) == 1:
            return arrays.find_npz(archives[0])
    if not archives and form == "auto":
        raise DataError(f"{path} contains no images of a known form", _WANTED)
    names = ", ".join(file.name for file in archives[:5]) or "none"
    raise DataError(f"{path} must hold one npz file, found {names}", "Give the file as task_options.path.")


_Means = Annotated[Sequence[Annotated[float, Field(allow_inf_nan=False)]], options.Listed]
_Deviations = Annotated[Sequence[Annotated[float, Field(gt=0, allow_inf_nan=False)]], options.Listed]
_PADDING_DIVISOR = 8  # crop pads by 1/8 of the shorter side: 4 pixels for 32x32, as is common


class Images(BuiltIn):
    """Classify images with one of the built-in models.

    Args:
        path: a folder, or an npz file.
        form: "auto", "idx", "folder" or "npz".
        model: "mlp", "convnet", "resnet18", "resnet34" or "resnet50".
        activation: activation of ResNets, "relu" or "silu".
        image_size: side of the images, or [height, width]; by default that of the files.
        augment: some of "crop", "flip" and "random_resized_crop", which are applied in this order:
            random_resized_crop, crop, flip.
        mean: mean of each channel, or one for all, in units of 255; by default measured on a sample.
        std: standard deviation, in the same form.
        eval_fraction: fraction of the images for evaluation, if the files have no separate part for it.
        split_seed: seed of that split.
        classes: number of classes; by default derived from the labels.
    """

    defaults: ClassVar = options.IMAGE_DEFAULTS

    @options.checked
    def __init__(
        self,
        path: options.Text | Path,
        *,
        form: Literal["auto", "idx", "folder", "npz"] = "auto",
        model: ImageModel = "convnet",
        activation: Literal["relu", "silu"] = "relu",
        image_size: options.Sides | None = None,
        augment: Annotated[Sequence[Literal["crop", "flip", "random_resized_crop"]], options.Listed] = (),
        mean: _Means | None = None,
        std: _Deviations | None = None,
        eval_fraction: options.Fraction = 0.1,
        split_seed: options.Seed = 0,
        classes: options.Count | None = None,
    ) -> None:
        self._model, self._activation = model, activation
        self._path = Path(path).expanduser()
        found = self._found = find(self._path, form)
        size = (image_size[0], image_size[-1]) if image_size else found.train.size
        if size is None:
            raise DataError(
                f"{self._path}: its images differ in size",
                "Set a size to resize all of them to: --set task_options.image_size=224.",
            )
        self._size: Size = size
        self._classes = _count_classes(found, classes)
        train, self._held_out = _split(found, eval_fraction, split_seed)
        self._normalisation = _normalisation(found.train, train, size, mean, std)
        made: dict[str, Transform] = {
            "random_resized_crop": RandomResizedCrop(size),
            "crop": Crop(max(1, min(size) // _PADDING_DIVISOR)),
            "flip": Flip(),
        }
        transforms = tuple(transform for name, transform in made.items() if name in augment)
        self._train = sources.ImageData(found.train, train, size, self._normalisation, transforms)

    def describe(self) -> str:
        """Return a description of the images that were found."""
        height, width = self._size
        grey = "" if self._found.train.channels == 3 else " grey"
        evaluated = first_set(self.eval_data())  # a subclass may return other data, or several sets
        to_evaluate = f", {len(evaluated):,} to evaluate" if isinstance(evaluated, sources.ImageData) else ""
        mean, std = (
            ", ".join(f"{value:.4g}" for value in values)
            for values in (self._normalisation.mean, self._normalisation.std)
        )
        return (
            f"{len(self._train):,}{grey} images {height}x{width} in {self._classes} classes{to_evaluate} "
            f"({self._found.form} in {self._path}); mean {mean}, std {std}"
        )

    def train_data(self) -> sources.ImageData:
        """Return the training data: inputs (height, width, channels), normalised; targets, the class."""
        return self._train

    def eval_data(self) -> sources.ImageData | None:
        """Return the evaluation data, of the same form."""
        apart = self._found.evaluation
        if apart is None and self._held_out is None:
            return None
        source = self._found.train if apart is None else apart
        return sources.ImageData(source, self._held_out, self._size, self._normalisation)

    def _built_in(self) -> tuple[Any, dict[str, Any]]:
        shape = (*self._size, self._found.train.channels)
        return module_and_sizes(self._model, shape, self._classes, self._activation)


task = Images


def _count_classes(found: sources.Found, classes: int | None) -> int:
    counted = sources.count_classes(found.train, classes or found.classes)
    if found.evaluation is not None:
        if found.evaluation.channels != found.train.channels:
            raise DataError(
                f"images: those for training have {found.train.channels} channels, "
                f"those for evaluation {found.evaluation.channels}"
            )
        sources.count_classes(found.evaluation, counted)
    return counted


def _split(found: sources.Found, fraction: float, seed: int) -> tuple[Any, Any]:
    """Return the indices for training and for evaluation; None for all images of a part."""
    count = len(found.train.labels)
    kept = round(count * (1 - fraction))
    if found.evaluation is not None or kept == count:
        return None, None
    if kept == 0:
        raise DataError(f"images: eval_fraction {fraction} leaves none of {count} images for training")
    shuffled = np.random.RandomState(seed).permutation(count)
    return shuffled[:kept], shuffled[kept:]


def _normalisation(source: Any, train: Any, size: Size, mean: Any, std: Any) -> sources.Normalisation:
    means = None if mean is None else _per_channel("mean", mean, source.channels)
    deviations = None if std is None else _per_channel("std", std, source.channels)
    if means is not None and deviations is not None:
        return sources.Normalisation(means, deviations)
    measured = sources.measure(source, train, size)
    return sources.Normalisation(means or measured.mean, deviations or measured.std)


def _per_channel(name: str, values: Sequence[float], channels: int) -> tuple[float, ...]:
    if len(values) not in (1, channels):
        raise TaskError(f"task_options.{name} must be one number for each of {channels} channels or for all")
    return tuple(values) if len(values) == channels else (values[0],) * channels
