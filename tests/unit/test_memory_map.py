"""Arrays in files: never copied whole, opened elsewhere at the same place; arrays that readers send."""

import os
import pickle
import threading
import tracemalloc
from multiprocessing import Pipe

import numpy as np
import pytest

from hvdtrain.data.datasets import as_dataset, fetch
from hvdtrain.data.serialization import (
    Payload,
    file_location,
    load_payload,
    map_location,
    memmap_base,
    receive,
    send,
)

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
    "of 32 bits, unaligned, in the other order": {"dtype": ">f4", "offset": 5},
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


@pytest.mark.parametrize("wrap", [np.asarray, np.array, lambda a: a[1:, ::3], lambda a: a.T])
def test_a_view_of_a_mapped_array_is_told_from_a_copy(wrap, tmp_path):
    array = wrap(in_file(tmp_path))
    assert (memmap_base(array) is None) == (wrap is np.array)


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("view", [lambda a: a, lambda a: a[7:, 4::5], lambda a: a[::-1].T], ids=[*"abc"])
def test_another_process_would_open_the_same_values(form, view, tmp_path):
    array = np.asarray(view(in_file(tmp_path, **form)))
    opened = map_location(*file_location(array), array.dtype, array.shape, array.strides)
    np.testing.assert_array_equal(opened, array)
    assert not opened.flags.writeable


def test_an_array_that_was_changed_since_it_was_mapped_has_no_place_in_its_file(tmp_path):
    in_file(tmp_path)
    assert file_location(np.memmap(tmp_path / "array", "f8", "c")) is None
    assert file_location(np.zeros(3)) is None


@pytest.mark.parametrize("dtype", ["f4", ">i2", "c16", [("a", "u1"), ("b", "f8")]], ids=str)
def test_a_shared_array_has_the_same_values_and_changes_on_one_side_only(dtype):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    with Payload({"all": array, "some": array[:, ::2]}) as payload:
        one, other = (load_payload(payload.descriptor) for _ in range(2))
    np.testing.assert_array_equal(one["all"], array)
    np.testing.assert_array_equal(one["some"], array[:, ::2])
    one["all"][0] = one["all"][2]
    np.testing.assert_array_equal(other["all"], array)


def test_arrays_of_a_reader_arrive_as_they_were_and_can_be_written_to():
    ours, theirs = Pipe()
    large = np.arange(3 << 18, dtype=np.float64).reshape(3, -1)
    sent = {"large": large, "columns": large.T, "none": np.zeros((0, 3)), "words": np.array(["a"], object)}
    with ours, theirs:
        for batch in (sent, {"next": np.ones(2)}):
            thread = threading.Thread(target=send, args=(theirs, batch))
            thread.start()
            found = receive(ours)
            thread.join()
            assert list(found) == list(batch)
            for name, array in found.items():
                np.testing.assert_array_equal(array, batch[name])
                assert array.flags.writeable


def test_a_reader_that_ends_within_an_array_is_noticed():
    ours, theirs = Pipe()
    with ours:
        theirs.send((pickle.dumps(None), [10]))
        os.write(theirs.fileno(), b"123")
        theirs.close()
        with pytest.raises(EOFError, match="closed the connection"):
            receive(ours)
