"""Data sets of every kind: one form, the same numbers whichever way they are fetched."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hvdtrain.data.datasets import ArrayDataset, as_dataset, fetch, signature
from hvdtrain.errors import DataError
from hvdtrain.jobs.opening.data_sets import find_merged

SIZE = 7
INPUTS = np.arange(SIZE * 6, dtype=np.float32).reshape(SIZE, 2, 3)
TARGETS = np.arange(SIZE) % 3


class Indexable:
    """Anything with __len__ and __getitem__."""

    def __init__(self, item: Callable[[int], Any], size: int = SIZE) -> None:
        self._item, self._size = item, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return self._item(index)


def hugging_face(columns: dict[str, list]) -> Any:
    pytest.importorskip("tqdm").tqdm.monitor_interval = 0  # no thread that stays
    return pytest.importorskip("datasets").Dataset.from_dict(columns)


def torch_dataset() -> Any:
    torch = pytest.importorskip("torch")
    return torch.utils.data.TensorDataset(torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))


SOURCES = {
    "mapping of arrays": lambda: {"inputs": INPUTS, "targets": TARGETS},
    "mapping of lists": lambda: {"inputs": INPUTS.tolist(), "targets": TARGETS.tolist()},
    "pair of arrays": lambda: (INPUTS, TARGETS),
    "array data set": lambda: ArrayDataset({"inputs": INPUTS, "targets": TARGETS}),
    "items that are mappings": lambda: Indexable(lambda i: {"inputs": INPUTS[i], "targets": TARGETS[i]}),
    "items that are tuples": lambda: Indexable(lambda i: (INPUTS[i], TARGETS[i])),
    "items that are lists": lambda: Indexable(lambda i: [INPUTS[i].tolist(), int(TARGETS[i])]),
    "list of pairs": lambda: list(zip(INPUTS, TARGETS, strict=True)),
    "torch": torch_dataset,
    "hugging face": lambda: hugging_face({"inputs": INPUTS.tolist(), "targets": TARGETS.tolist()}),
}


@pytest.fixture(params=SOURCES)
def source(request):
    return SOURCES[request.param]()


def test_every_kind_of_source_gives_the_same_batch(source):
    dataset = as_dataset(source)
    batch = fetch(dataset, np.asarray([4, 1]))
    assert len(dataset) == SIZE
    np.testing.assert_array_equal(batch["inputs"], INPUTS[[4, 1]])
    np.testing.assert_array_equal(batch["targets"], TARGETS[[4, 1]])
    assert (batch["inputs"].dtype, batch["targets"].dtype) == (np.float32, np.int64)


def test_arrays_of_64_bits_are_converted_once_for_a_model_of_32():
    dataset = as_dataset((INPUTS.astype(np.float64), TARGETS))
    assert find_merged({"training data": dataset}) is None
    assert {name: a.dtype for name, a in dataset.arrays.items()} == {
        "inputs": np.float32,
        "targets": np.int64,
    }
    np.testing.assert_array_equal(dataset.arrays["inputs"], INPUTS)


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"image": INPUTS, "label": TARGETS},
        lambda: Indexable(lambda i: {"image": INPUTS[i], "label": TARGETS[i]}),
        lambda: hugging_face({"image": INPUTS.tolist(), "label": TARGETS.tolist()}),
    ],
)
def test_keys_can_be_named(make):
    dataset = as_dataset(make(), inputs="image", targets="label")
    assert sorted(fetch(dataset, np.asarray([0]))) == ["inputs", "targets"]


def test_columns_that_are_missing_are_named():
    frame = pytest.importorskip("pandas").DataFrame({"image": [1.0], "label": [0]})
    for data in ({"image": INPUTS, "label": TARGETS}, frame):
        with pytest.raises(DataError, match=r"no column 'images'; it has \['image', 'label'\]\nName its"):
            as_dataset(data, inputs="images")


def test_what_cannot_be_indexed_is_refused():
    with pytest.raises(DataError, match="must be arrays or have __len__ and __getitem__, found a set"):
        as_dataset({1, 2})


@pytest.mark.parametrize("source", [(INPUTS[:0], TARGETS[:0]), [], {}, {"inputs": 3.0}], ids=str)
def test_an_empty_data_set_is_refused(source):
    with pytest.raises(DataError, match=r"the training data is empty \(0 samples\)"):
        signature(as_dataset(source), "training data")


def test_what_is_not_numbers_is_refused():
    dates = {"inputs": INPUTS, "targets": np.asarray(["2026-01-01"] * SIZE, "datetime64[D]")}
    for source in (dates, Indexable(lambda i: (INPUTS[i], "cat"))):
        with pytest.raises(DataError, match=r"the evaluation data holds .* 'targets'; it must be numbers"):
            signature(as_dataset(source), "evaluation data")


def test_samples_of_unequal_shapes_are_named():
    dataset = as_dataset(Indexable(lambda i: {"inputs": np.zeros(3 if i == 5 else 2)}))
    with pytest.raises(
        DataError, match=r"'inputs' of sample 5 has shape \(3,\), that of sample 4 has shape \(2,\)"
    ):
        fetch(dataset, np.asarray([4, 5, 6]))
