"""Images from files: every form gives the same arrays, or is refused with file, position and rule."""

import numpy as np
import pytest
from PIL import Image
from support.image_files import FORMS, digits, idx_bytes, in_colour, write, write_folder, write_idx

from hvdtrain.data.datasets import fetch, signature
from hvdtrain.errors import DataError
from hvdtrain.tasks.images import Images

COUNT = 200
IMAGES, LABELS = digits()[0][:COUNT], digits()[1][:COUNT]
ALL = np.arange(COUNT)
CUT = idx_bytes(IMAGES)[:-100]


def by_content(arrays: dict[str, np.ndarray]) -> list[bytes]:
    """Give samples in an order that does not depend on the files'."""
    return sorted(
        image.tobytes() + target.tobytes()
        for image, target in zip(arrays["inputs"], arrays["targets"], strict=True)
    )


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_grey_images(tmp_path, form):
    task = Images(path=write(form, tmp_path, IMAGES, LABELS), eval_fraction=0, mean=0.25, std=0.5)
    data = task.train_data()
    assert signature(data, "training data") == {"inputs": "float32[8, 8, 1]", "targets": "int64[]"}
    expected = {"inputs": ((IMAGES / 255 - 0.25) / 0.5).astype(np.float32)[..., None], "targets": LABELS}
    found = fetch(data, ALL)
    order = np.argsort(LABELS, kind="stable") if form == "folder" else ALL
    np.testing.assert_allclose(found["inputs"], expected["inputs"][order], atol=1e-6)
    np.testing.assert_array_equal(found["targets"], expected["targets"][order])
    assert task.eval_data() is None


def test_every_form_gives_the_same_colours(tmp_path):
    colours = in_colour(IMAGES)
    places = [write(form, tmp_path, colours, LABELS) for form in FORMS]
    found = [fetch(Images(path=p, eval_fraction=0, mean=0, std=1).train_data(), ALL) for p in places]
    assert found[0]["inputs"].shape == (COUNT, 32, 32, 3)
    for other in found[1:]:
        assert by_content(other) == by_content(found[0])


def test_parts_that_lie_apart_are_used_so(tmp_path):
    write_idx(tmp_path / "idx", IMAGES, LABELS, end=".gz")
    write_idx(tmp_path / "idx", IMAGES[:30], LABELS[:30], "t10k")
    np.savez(
        tmp_path / "k.npz", x_train=IMAGES, y_train=LABELS[:, None], x_test=IMAGES[:30], y_test=LABELS[:30]
    )
    write_folder(tmp_path / "folder" / "train", IMAGES, LABELS)
    write_folder(tmp_path / "folder" / "val", IMAGES[:30], LABELS[:30])
    for place in ("idx", "k.npz", "folder"):
        task = Images(path=str(tmp_path / place))
        assert (len(task.train_data()), len(task.eval_data())) == (COUNT, 30)
        assert set(by_content(fetch(task.eval_data(), ALL[:30]))) <= set(
            by_content(fetch(task.train_data(), ALL))
        )


def test_one_set_is_split_by_a_seed_without_overlap(tmp_path):
    path = write("idx", tmp_path, IMAGES, LABELS)
    parts = []
    for seed in (0, 0, 1):
        task = Images(path=path, eval_fraction=0.25, split_seed=seed)
        parts.append([by_content(fetch(d, np.arange(len(d)))) for d in (task.train_data(), task.eval_data())])
    assert [len(part) for part in parts[0]] == [150, 50]
    assert parts[0] == parts[1] != parts[2]
    whole = Images(path=path, eval_fraction=0, mean=task._normalisation.mean, std=task._normalisation.std)
    assert sorted(parts[2][0] + parts[2][1]) == by_content(fetch(whole.train_data(), ALL))


@pytest.mark.parametrize(
    ("image", "expected"),
    [
        (Image.new("P", (8, 8), 0), (0, 0, 0)),
        (Image.new("RGBA", (8, 8), (10, 20, 30, 128)), (10, 20, 30)),
        (Image.new("1", (8, 8), 1), (255, 255, 255)),
    ],
)
def test_images_of_all_kinds_become_colours(tmp_path, image, expected):
    folder = write_folder(tmp_path, in_colour(IMAGES[:4], side=8), np.array([0, 0, 1, 1]))
    image.save(folder / "class 0" / "zz.png")
    task = Images(path=folder, mean=0, std=1 / 255, eval_fraction=0)
    assert fetch(task.train_data(), np.array([2]))["inputs"][0, 3, 3].round().tolist() == list(expected)


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
