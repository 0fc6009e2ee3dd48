"""Arrays in files: never copied whole, opened elsewhere at the same place; arrays that readers send."""

import tracemalloc

import numpy as np
import pytest

from hvdtrain.data.datasets import as_dataset, fetch
from hvdtrain.data.serialization import file_location, map_location

ROWS, WIDTH = 64, 1 << 14  # of 64-bit floats: 8 MiB


def in_file(folder, dtype="f8", order="C", offset: int = 0) -> np.ndarray:
    """Give an array in a file of rows that tell their number."""
    path = folder / "array"
    array = np.memmap(path, dtype, "w+", offset, (ROWS, WIDTH), order)
    array[:] = np.arange(ROWS)[:, None]
    array.flush()
    return np.memmap(path, dtype, "r", offset, (ROWS, WIDTH), order)


FORMS = {
    "plain": {},
    "the other order of bytes": {"dtype": ">f8"},
    "columns first": {"order": "F"},
    "unaligned": {"offset": 3},
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_batch_of_an_array_in_a_file_takes_the_memory_of_the_batch(form, tmp_path):
    mapped = in_file(tmp_path, **form)
    as_dataset({"inputs": np.zeros((2, 2))}).batch(np.asarray([0]))  # what is imported on first use
    tracemalloc.start()
    try:
        data = as_dataset({"inputs": mapped, "targets": np.zeros(ROWS)})
        arrays = fetch(data, np.asarray([3, 60]))
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert arrays["inputs"].dtype == np.dtype("float32")
    assert arrays["inputs"].dtype.isnative
    assert arrays["inputs"][:, 5].tolist() == [3, 60]
    assert peak_bytes < mapped.nbytes / 8


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[7:, 4::5], lambda a: a[::-1].T], ids=[*"abc"])
def test_another_process_would_open_the_same_values(form, view, tmp_path):
    array = np.asarray(view(in_file(tmp_path, **form)))
    opened = map_location(*file_location(array), array.dtype, array.shape, array.strides)
    np.testing.assert_array_equal(opened, array)
    assert not opened.flags.writeable
