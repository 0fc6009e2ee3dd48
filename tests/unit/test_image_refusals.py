"""What the task images refuses: with the file, the position in it and the rule."""

import numpy as np
import pytest
from PIL import Image
from support.image_files import digits, idx_bytes, write_folder, write_idx

from hvdtrain.errors import DataError
from hvdtrain.tasks.images import Images

COUNT = 200
IMAGES, LABELS = digits()[0][:COUNT], digits()[1][:COUNT]
ALL = np.arange(COUNT)

REFUSED = {
    "nothing known": (
        lambda p: {"path": p},
        DataError,
        "contains no images of a known form\nExpected: IDX files",
    ),
    "no labels": (
        lambda p: {"path": _file(p / "train-images-idx3-ubyte", idx_bytes(IMAGES)).parent},
        DataError,
        "there is no file of labels next to .*train-images-idx3-ubyte",
    ),
    "swapped files": (
        lambda p: {
            "path": _file(write_idx(p, IMAGES, LABELS) / "train-images-idx3-ubyte", idx_bytes(LABELS)).parent
        },
        DataError,
        "byte 0: the magic number must be 0x00000803 or 0x00000804, found 0x00000801",
    ),
    "a short file of another form": (
        lambda p: {"path": _file(write_idx(p, IMAGES, LABELS) / "train-images-idx3-ubyte", b"<html>").parent},
        DataError,
        "byte 0: the magic number .*, found 0x3c68746d",
    ),
    "an idx header cut short": (
        lambda p: {
            "path": _file(
                write_idx(p, IMAGES, LABELS) / "train-images-idx3-ubyte", idx_bytes(IMAGES)[:9]
            ).parent
        },
        DataError,
        "is truncated within its header",
    ),
    "a label beyond the classes": (
        lambda p: {"path": write_idx(p, IMAGES, np.where(ALL == 17, 9, LABELS % 9)), "classes": 9},
        DataError,
        "labels-idx1-ubyte, sample 17: label 9 is out of range; there are 9 classes",
    ),
    "idx cut short": (
        lambda p: {"path": _cut(write_idx(p, IMAGES, LABELS) / "train-images-idx3-ubyte", 100).parent},
        DataError,
        "is truncated.*the header declares 200 x 8 x 8 = 12,800 bytes",
    ),
    "floats": (
        lambda p: {"path": _npz(p, x_train=IMAGES / 255, y_train=LABELS)},
        DataError,
        "x_train: images must be uint8 .*found float64",
    ),
    "channels first": (
        lambda p: {"path": _npz(p, images=np.zeros((5, 3, 8, 8), np.uint8), labels=LABELS[:5])},
        DataError,
        "with 1 or 3 channels, found 5 x 3 x 8 x 8",
    ),
    "sizes that differ": (
        lambda p: {"path": _two_sizes(p)},
        DataError,
        "its images differ in size\nSet a size .*task_options.image_size",
    ),
}


def _file(path, content):
    path.write_bytes(content)
    return path


def _cut(path, by):
    return _file(path, path.read_bytes()[:-by])


def _npz(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return folder


def _two_sizes(folder):
    write_folder(folder, IMAGES, LABELS)
    Image.fromarray(IMAGES[0]).resize((9, 8)).save(folder / "class 0" / "00000.png")
    return folder


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_file_and_place(tmp_path, case):
    options, kind, said = REFUSED[case]
    with pytest.raises(kind, match=f"(?s){said}"):
        Images(**options(tmp_path))
