"""Damaged images of every form: a clear error or no harm, never anything else, never much memory."""

import gzip
import resource
import struct
import time
import zlib
from io import BytesIO

import numpy as np
import pytest
from PIL import Image
from support.image_files import digits, idx_bytes, in_colour, write_folder, write_idx
from support.mutations import every

from hvdtrain.data.datasets import fetch
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.tasks.images import Images

COUNT = 40
IMAGES, LABELS = digits()[0][:COUNT], np.arange(COUNT) % 10
COLOURS = in_colour(IMAGES)
SECONDS, MEMORY_BYTES = 60, 100 << 20


def npz_bytes(save=np.savez) -> bytes:
    buffer = BytesIO()
    save(buffer, x_train=IMAGES, y_train=LABELS)
    return buffer.getvalue()


def image_bytes(kind: str) -> bytes:
    buffer = BytesIO()
    Image.fromarray(COLOURS[0]).save(buffer, kind)
    return buffer.getvalue()


# form: (the file that is damaged, its content, count, length of its header, where sizes lie in it)
TARGETS = {
    "IDX images": ("train-images-idx3-ubyte", idx_bytes(IMAGES), 8, 16, (4, 8, 12)),
    "IDX labels": ("train-labels-idx1-ubyte", idx_bytes(LABELS), 8, 8, (4,)),
    "gzipped IDX": ("train-images-idx3-ubyte.gz", gzip.compress(idx_bytes(IMAGES), mtime=0), 12, 30, ()),
    "npz": ("images.npz", npz_bytes(), 25, 120, ()),
    "compressed npz": ("images.npz", npz_bytes(np.savez_compressed), 25, 120, ()),
    "PNG": ("class 0/00000.png", image_bytes("PNG"), 12, 40, (16, 20)),
    "JPEG": ("class 0/00000.jpg", image_bytes("JPEG"), 12, 200, ()),
}
LEAST_NOTICED = 0.4  # of the damage; a changed pixel does no harm


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    """A folder for each form, whole: only the damaged file changes from test to test."""
    found = {}
    for form, (file, good, *_) in TARGETS.items():
        place = tmp_path_factory.mktemp("damaged")
        if "IDX" in form:
            write_idx(place, IMAGES, LABELS, end=".gz" if file.endswith(".gz") else "")
        elif "npz" not in form:
            write_folder(place, COLOURS[1:5], np.array([0, 1, 1, 0]))
        (place / file).write_bytes(good)
        found[form] = place
    return found


def read_all(place) -> None:
    data = Images(path=place, eval_fraction=0, image_size=32).train_data()
    fetch(data, np.arange(len(data)))


def refusal(place) -> DataError | None:
    """Give the error of reading a place; any but a DataError goes through."""
    try:
        read_all(place)
    except DataError as error:
        return error
    return None


def memory_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.filterwarnings("ignore:.*:UserWarning:PIL")
@pytest.mark.parametrize("form", TARGETS)
def test_a_damaged_file_is_an_error_that_names_it_or_does_no_harm(places, form):
    file, good, count, header, numbers = TARGETS[form]
    path, before, noticed = places[form] / file, memory_bytes(), []
    for name, content in every(good, count, header, numbers):
        path.write_bytes(content)
        begun = time.monotonic()
        said = refusal(places[form])
        noticed.append(said is not None)
        if said is not None:
            assert str(places[form]) in said.problem, name
            assert isinstance(said, BadSampleError) == ("class" in file), name
        assert time.monotonic() - begun < SECONDS, name
    path.write_bytes(good)
    assert memory_bytes() - before < MEMORY_BYTES
    assert np.mean(noticed) > LEAST_NOTICED


def png_of(width: int, height: int, pixels: bytes) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(pixels)) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [3_000, 2**31 - 1])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_an_image_that_declares_a_huge_size_is_refused_before_it_is_decoded(places, side):
    path = places["PNG"] / "class 0/00000.png"
    good, before = path.read_bytes(), memory_bytes()
    path.write_bytes(png_of(side, side, b"\0" * 1000))
    with pytest.raises(BadSampleError, match=f"{path} cannot be read: "):
        read_all(places["PNG"])
    path.write_bytes(good)
    assert memory_bytes() - before < 20 << 20
