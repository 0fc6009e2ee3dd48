"""Writing the same images in every form that the task images reads."""

import gzip
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from hvdtrain.tasks.digits import Digits

FORMS = ("idx", "idx.gz", "npz", "npz compressed", "folder")


@cache
def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return scikit-learn's digits as bytes (1797, 8, 8) with their labels."""
    arrays = [data.batch(np.arange(len(data))) for data in (Digits().train_data(), Digits().eval_data())]
    images = np.concatenate([array["inputs"] for array in arrays])[..., 0]
    sixteenths = np.rint(images * 6 + 4.9)  # 0 to 16
    labels = np.concatenate([array["targets"] for array in arrays])
    return np.rint(sixteenths * (255 / 16)).astype(np.uint8), labels


def in_colour(images: np.ndarray, side: int = 32) -> np.ndarray:
    """Return square grey images larger, and in three channels that differ."""
    times = side // images.shape[1]
    large = images.repeat(times, axis=1).repeat(times, axis=2)
    return np.stack([large, 255 - large, large // 2], axis=3)


def idx_bytes(array: np.ndarray) -> bytes:
    sides = b"".join(side.to_bytes(4) for side in array.shape)
    return bytes([0, 0, 8, array.ndim]) + sides + array.astype(np.uint8).tobytes()


def write_idx(
    folder: Path, images: np.ndarray, labels: np.ndarray, part: str = "train", end: str = ""
) -> Path:
    """Write images and labels as MNIST's files are named; ``end`` is ".gz" or nothing."""
    folder.mkdir(exist_ok=True)
    for name, array in ((f"images-idx{images.ndim}", images), ("labels-idx1", labels)):
        content = idx_bytes(array)
        packed = gzip.compress(content, 1, mtime=0) if end else content
        (folder / f"{part}-{name}-ubyte{end}").write_bytes(packed)
    return folder


def write_folder(folder: Path, images: np.ndarray, labels: np.ndarray, suffix: str = ".png") -> Path:
    """Write an image per file, in a sub-folder per class."""
    for place, (image, label) in enumerate(zip(images, labels, strict=True)):
        below = folder / f"class {label}"
        below.mkdir(parents=True, exist_ok=True)
        Image.fromarray(image).save(below / f"{place:05}{suffix}")
    return folder


def write(form: str, root: Path, images: np.ndarray, labels: np.ndarray) -> Path:
    """Write a training set in a form of ``FORMS``; return the path for the task."""
    place = root / form.replace(" ", "-")
    if form.startswith("npz"):
        place.mkdir()
        save = np.savez_compressed if "compressed" in form else np.savez
        save(place / "images.npz", x_train=images, y_train=labels)
        return place / "images.npz"
    if form == "folder":
        return write_folder(place, images, labels)
    return write_idx(place, images, labels, end=".gz" if form.endswith("gz") else "")
