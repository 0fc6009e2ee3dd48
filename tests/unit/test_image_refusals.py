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
CUT = idx_bytes(IMAGES)[:-100]


def _file(path, content):
    path.write_bytes(content)
    return path


def _npz(folder, **arrays):
    np.savez(folder / "a.npz", **arrays)
    return folder


def _two_sizes(folder):
    write_folder(folder, IMAGES, LABELS)
    Image.fromarray(IMAGES[0]).resize((9, 8)).save(folder / "class 0" / "00000.png")
    return folder


REFUSED = {
    "nothing known": (lambda p: p, "contains no images of a known form\nExpected: IDX files"),
    "no labels": (
        lambda p: _file(p / "train-images-idx3-ubyte", idx_bytes(IMAGES)).parent,
        "there is no file of labels next to .*train-images-idx3-ubyte",
    ),
    "too few labels": (
        lambda p: _npz(p, images=IMAGES, labels=LABELS[1:]),
        r"there are 200 images, and labels of shape \(199,\)",
    ),
    "channels first": (
        lambda p: _npz(p, images=np.zeros((5, 3, 8, 8), np.uint8), labels=LABELS[:5]),
        "with 1 or 3 channels, found 5 x 3 x 8 x 8",
    ),
    "swapped files": (
        lambda p: _file(write_idx(p, IMAGES, LABELS) / "train-images-idx3-ubyte", idx_bytes(LABELS)).parent,
        "byte 0: the magic number must be 0x00000803 or 0x00000804, found 0x00000801",
    ),
    "idx cut short": (
        lambda p: _file(write_idx(p, IMAGES, LABELS) / "train-images-idx3-ubyte", CUT).parent,
        "is truncated.*the header declares 200 x 8 x 8 = 12,800 bytes",
    ),
    "a label beyond the classes": (
        lambda p: write_idx(p, IMAGES, np.where(ALL == 17, 99, LABELS)),
        "labels-idx1-ubyte, sample 17: label 99 is out of range; there are 10 classes",
    ),
    "floats": (
        lambda p: _npz(p, x_train=IMAGES / 255, y_train=LABELS),
        "x_train: images must be uint8 .*found float64",
    ),
    "sizes that differ": (_two_sizes, "its images differ in size\nSet a size .*task_options.image_size"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_with_file_and_place(tmp_path, case):
    make, said = REFUSED[case]
    with pytest.raises(DataError, match=f"(?s){said}"):
        Images(path=make(tmp_path), classes=10)
