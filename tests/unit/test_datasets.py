"""Data as people have them: one form, the same numbers whichever way they are fetched; their fingerprints."""

from typing import Any

import numpy as np
import pytest

import hvdtrain
from hvdtrain.data.datasets import ArrayDataset, as_dataset, fetch, signature
from hvdtrain.data.fingerprint import digest, first_difference, is_same, probe_indices, take_fingerprint
from hvdtrain.data.readers import LocalFetch
from hvdtrain.errors import BadSampleError, DataError
from hvdtrain.jobs.opening.data_sets import align_columns, find_merged

SIZE = 5
INPUTS = np.arange(SIZE * 6, dtype=np.float32).reshape(SIZE, 2, 3)
TARGETS = np.arange(SIZE) % 3
A = np.arange(SIZE * 2, dtype=np.float32).reshape(SIZE, 2)
B = np.arange(SIZE, dtype=np.float32)[:, None]
Y = np.arange(SIZE)
WORDS = [list(range(1, 1 + length)) for length in (3, 1, 5, 2, 4)]


def class_of(package: str, name: str) -> Any:
    """Make an object of a class that another package could have."""
    return type(name, (), {"__module__": f"{package}.inside"})()


def batch_of(source: Any) -> dict[str, np.ndarray]:
    return fetch(as_dataset(source), np.asarray([3, 0]))


def frame(**columns: Any) -> Any:
    return pytest.importorskip("pandas").DataFrame(columns)


class Samples:
    """Samples that a function makes."""

    def __init__(self, item: Any) -> None:
        self._item = item

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> Any:
        assert type(index) is int
        return self._item(index)


def hugging_face(**columns: list) -> Any:
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
    "items that are mappings": lambda: Samples(lambda i: {"inputs": INPUTS[i], "targets": TARGETS[i]}),
    "items that are tuples": lambda: Samples(lambda i: (INPUTS[i], TARGETS[i])),
    "items that are lists": lambda: Samples(lambda i: [INPUTS[i].tolist(), int(TARGETS[i])]),
    "list of pairs": lambda: list(zip(INPUTS, TARGETS, strict=True)),
    "torch": torch_dataset,
    "hugging face": lambda: hugging_face(inputs=INPUTS.tolist(), targets=TARGETS.tolist()),
}


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_every_kind_of_source_gives_the_same_batch(make):
    dataset = as_dataset(make())
    batch = fetch(dataset, np.asarray([4, 1]))
    assert len(dataset) == SIZE
    np.testing.assert_array_equal(batch["inputs"], INPUTS[[4, 1]])
    np.testing.assert_array_equal(batch["targets"], TARGETS[[4, 1]])
    assert (batch["inputs"].dtype, batch["targets"].dtype) == (np.float32, np.int64)


def test_arrays_of_64_bits_are_converted_once_for_a_model_of_32():
    dataset = as_dataset((INPUTS.astype(np.float64), TARGETS))
    assert find_merged({"training data": dataset}) is None
    assert (dataset.arrays["inputs"].dtype, dataset.arrays["targets"].dtype) == (np.float32, np.int64)
    np.testing.assert_array_equal(dataset.arrays["inputs"], INPUTS)


def test_keys_can_be_named_and_those_that_are_missing_are():
    samples = Samples(lambda i: {"image": INPUTS[i], "label": TARGETS[i]})
    for data in ({"image": INPUTS, "label": TARGETS}, samples, hugging_face(image=[1.0], label=[0])):
        dataset = as_dataset(data, inputs="image", targets="label")
        assert sorted(fetch(dataset, np.asarray([0]))) == ["inputs", "targets"]
    for data in ({"image": INPUTS, "label": TARGETS}, frame(image=[1.0], label=[0])):
        with pytest.raises(DataError, match=r"no column 'images'; it has \['image', 'label'\]\nName its"):
            as_dataset(data, inputs="images")


@pytest.mark.parametrize("source", [(INPUTS[:0], TARGETS[:0]), [], {}, {"inputs": 3.0}], ids=str)
def test_an_empty_data_set_is_refused(source):
    with pytest.raises(DataError, match=r"the training data is empty \(0 samples\)"):
        signature(as_dataset(source), "training data")


def test_what_is_not_numbers_is_refused():
    dates = {"inputs": INPUTS, "targets": np.asarray(["2026-01-01"] * SIZE, "datetime64[D]")}
    for source in (dates, Samples(lambda i: (INPUTS[i], "cat"))):
        with pytest.raises(DataError, match=r"the evaluation data holds .* 'targets'; it must be numbers"):
            signature(as_dataset(source), "evaluation data")


def test_samples_of_unequal_shapes_are_named():
    dataset = as_dataset(Samples(lambda i: {"inputs": np.zeros(3 if i == 5 else 2)}))
    with pytest.raises(
        DataError, match=r"'inputs' of sample 5 has shape \(3,\), that of sample 4 has shape \(2,\)"
    ):
        fetch(dataset, np.asarray([4, 5, 6]))


@pytest.mark.parametrize(
    "source",
    [
        {"inputs": {"a": A, "b": B}, "targets": Y},
        ({"a": A, "b": B}, Y),
        Samples(lambda i: {"inputs": {"a": A[i], "b": B[i]}, "targets": Y[i]}),
        Samples(lambda i: ({"a": A[i], "b": B[i]}, Y[i])),
    ],
    ids=["mapping", "pair", "items that are mappings", "items that are pairs"],
)
def test_inputs_can_be_a_mapping(source):
    batch = batch_of(source)
    assert sorted(batch) == ["inputs/a", "inputs/b", "targets"]
    np.testing.assert_array_equal(batch["inputs/b"], B[[3, 0]])


def test_a_data_set_can_nest_its_own_batches():
    class Own(Samples):
        def batch(self, indices: np.ndarray) -> Any:
            return {"inputs": (A[indices], B[indices]), "targets": Y[indices]}

    own = Own(lambda index: pytest.fail("batch serves"))
    assert sorted(batch_of(own)) == ["inputs/0", "inputs/1", "targets"]
    with pytest.raises(DataError, match=r"Own makes its batches itself: inputs, targets and collate"):
        as_dataset(own, inputs="a")


def test_columns_of_a_frame_are_names_and_text_is_left_out():
    made = frame(age=[1.5] * SIZE, flag=[True] * SIZE, name=list("abcde"), note=[None, *"abcd"], label=Y)
    dataset = as_dataset(made)
    assert signature(dataset, "data") == {"age": "float32[]", "flag": "bool[]", "label": "int64[]"}
    assert dataset.notes == ("the columns name, note are left out: not numbers",)


@pytest.mark.parametrize(
    "column", [[1.0, "a", 2.0, 3.0, 4.0], [True, None, False, True, True]], ids=["text", "missing"]
)
def test_a_column_that_mixes_numbers_with_others_is_named(column):
    made = frame(age=B[:, 0])
    made["mixed"] = np.asarray(column, object)
    with pytest.raises(DataError, match=r"the column 'mixed' of a data frame mixes numbers .*object\n"):
        as_dataset(made)


def test_columns_of_a_hugging_face_data_set_stay_and_text_is_left_out():
    data = hugging_face(text=list("abcde"), input_ids=A.tolist(), words=[["a"]] * SIZE, label=Y.tolist())
    dataset = as_dataset(data)
    assert dataset.notes == ("the columns text, words are left out: not numbers",)
    assert signature(dataset, "data") == {"input_ids": "float32[2]", "label": "int64[]"}
    chosen = as_dataset(data.with_format("torch", columns=["label"]))
    assert list(signature(chosen, "data")) == ["label"]


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ({1, 2}, "must be arrays or have __len__ and __getitem__, found a set"),
        (class_of("torch", "DataLoader"), r"found torch.inside.DataLoader\nGive its data set \(loader"),
        (class_of("datasets", "IterableDataset"), "without streaming=True"),
        (class_of("tensorflow", "DatasetV2"), r"It is a stream: wrap it.*\n?.*as_numpy_iterator\(\)"),
        (class_of("keras", "PyDataset"), "Its items are batches"),
        ((x for x in []), r"found generator\nIt can be passed over only once"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_used_is_named_with_the_way_out(source, said):
    with pytest.raises(DataError, match=said):
        as_dataset(source)


COLUMNS = {"ids": WORDS, "mask": [[1] * len(word) for word in WORDS], "labels": Y.tolist()}
PAD = {"ids": 0, "mask": 0}


@pytest.mark.parametrize(
    "source",
    [
        lambda: COLUMNS,
        lambda: Samples(lambda i: {name: values[i] for name, values in COLUMNS.items()}),
        lambda: hugging_face(**COLUMNS, text=list("abcde")),
        lambda: frame(**COLUMNS),
    ],
    ids=["mapping", "items", "hugging face", "frame"],
)
def test_pad_fills_up_to_the_next_power_of_two(source):
    dataset = as_dataset(source(), collate=hvdtrain.pad(PAD))
    batch = fetch(dataset, np.asarray([0, 3, 1]))
    assert batch["ids"].tolist() == [[1, 2, 3, 0], [1, 2, 0, 0], [1, 0, 0, 0]]
    assert batch["mask"].tolist() == [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch["labels"].tolist() == [0, 3, 1]
    assert fetch(dataset, np.asarray([2]))["ids"].shape == (1, 8)
    assert len(dataset) == SIZE
    assert dataset[2]["ids"].shape == (8,)
    assert not dataset.notes or "text is left out" in dataset.notes[0]


@pytest.mark.parametrize(
    ("samples", "said"),
    [
        ([{"ids": [1]}, {"mask": [1]}], "a sample has no column 'ids'"),
        ([{"ids": [1], "x": [1]}, {"ids": [1], "x": [1, 2]}], "Name it among the columns to pad: 'x'"),
        ([{"ids": 3}], "'ids' is one number for each sample"),
        ([{"ids": [[1]]}, {"ids": [[1, 2]]}], "Only the first axis is padded"),
        ([{"ids": [1, 2, 3]}], "a sample has length 3, and longest is 2\nTruncate"),
    ],
)
def test_what_cannot_be_padded_is_named(samples, said):
    with pytest.raises(DataError, match=said):
        hvdtrain.pad({"ids": 0}, longest=2)(samples)
    with pytest.raises(DataError, match="must be 1 or more, found 0"):
        hvdtrain.pad({"ids": 0}, multiple=0)


@pytest.mark.parametrize(
    ("given", "fill", "expected"),
    [(np.int32, 0, np.int32), (np.bool_, 0, np.bool_), (np.uint8, -100, np.int16)],
)
def test_padding_keeps_the_type_if_it_can_hold_the_value(given, fill, expected):
    padded = hvdtrain.pad({"x": fill})([{"x": np.ones(2, given)}, {"x": np.ones(1, given)}])["x"]
    assert padded.dtype == expected
    assert padded[1, 1] == fill
    assert hvdtrain.pad({"x": 0})([{"x": np.ones(2, given)}, {"x": []}])["x"].dtype == given


def test_a_function_collates_nested_samples_and_pairs():
    seen = []

    def collate(samples: list[Any]) -> Any:
        seen.append(samples)
        ids = np.zeros((len(samples), 5), int)
        for row, sample in zip(ids, samples, strict=True):
            row[: len(sample["inputs"]["ids"])] = sample["inputs"]["ids"]
        return {"ids": ids, "mask": ids > 0}, [sample["targets"] for sample in samples]

    dataset = as_dataset({"inputs": {"ids": WORDS}, "targets": Y}, collate=collate)
    batch = fetch(dataset, np.asarray([1, 2]))
    shapes = {name: array.shape for name, array in batch.items()}
    assert shapes == {"inputs/ids": (2, 5), "inputs/mask": (2, 5), "targets": (2,)}
    assert seen[-1][1] == {"inputs": {"ids": [1, 2, 3, 4, 5]}, "targets": 2}
    assert as_dataset(dataset) is dataset


def test_what_is_no_batch_of_the_samples_is_refused():
    for result in ({"inputs": np.zeros(3)}, {"inputs": 0.5}):
        with pytest.raises(DataError, match="collate was given 2 samples and returned 'inputs' of shape"):
            fetch(as_dataset((A, Y), collate=lambda samples, result=result: result), np.asarray([0, 1]))


def test_bad_samples_of_a_collated_data_set_are_replaced():
    def item(index: int) -> Any:
        if index == 1:
            raise BadSampleError("1 is cut off")
        return {name: values[index] for name, values in COLUMNS.items()}

    dataset = as_dataset(Samples(item), collate=hvdtrain.pad(PAD))
    arrays, bad = LocalFetch(dataset, skip=True)(np.asarray([0, 1, 3]))
    assert arrays["ids"].shape == (3, 8)
    assert arrays["labels"].tolist() == [0, 2, 3]
    assert [(sample.index, sample.replacement_index) for sample in bad] == [(1, 2)]


@pytest.mark.parametrize("table", [frame, lambda **columns: frame(**columns).to_records(index=False)])
def test_columns_of_tables_are_put_in_the_order_of_the_model_or_refused(table):
    train = as_dataset((table(a=A[:, 0], b=A[:, 1]), Y))
    other = as_dataset((table(b=A[:, 1], a=A[:, 0]), Y))
    (note,) = align_columns({"evaluation data": other}, train.columns, "the training data")
    assert note.endswith("'inputs' are put in the order of the training data, by their names")
    np.testing.assert_array_equal(fetch(other, np.arange(SIZE))["inputs"], A)
    assert not align_columns({"evaluation data": other}, train.columns, "the training data")
    others = as_dataset({"inputs": table(b=A[:, 1], c=A[:, 0]), "targets": Y})
    with pytest.raises(DataError, match=r"other columns than that of it: not 'a', but 'c'"):
        align_columns({"evaluation data": others}, train.columns, "it")


@pytest.mark.parametrize(
    "source",
    [(np.ma.masked_array(A, A > 1), Y), Samples(lambda i: {"inputs": A[i], "targets": np.ma.masked})],
)
def test_masked_values_are_refused(source):
    with pytest.raises(DataError, match="is a masked array"):
        batch_of(source)


def arrays(size=100, seed=0):
    generator = np.random.default_rng(seed)
    return {"inputs": generator.normal(size=(size, 5)), "targets": generator.integers(0, 9, size)}


class Noting:
    """Samples that note which of them were read."""

    def __init__(self, size, make=lambda index: index):
        self.size, self.make, self.read = size, make, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"inputs": self.make(index)}


def test_a_slow_data_set_is_represented_by_fewer_samples():
    dataset = Noting(1000)
    found = take_fingerprint(as_dataset(dataset), seconds=0)
    assert dataset.read == [0]
    assert first_difference(found, take_fingerprint(as_dataset(Noting(1000)))) is None
    other = take_fingerprint(as_dataset(Noting(1000, lambda index: index + 1)))
    assert first_difference(found, other) == (0, "inputs")


def test_equal_data_have_equal_fingerprints_whatever_they_are_in():
    held = arrays()
    as_pairs = [(x, int(y)) for x, y in zip(held["inputs"], held["targets"], strict=True)]
    assert take_fingerprint(as_dataset(held)) == take_fingerprint(as_dataset(as_pairs))


@pytest.mark.parametrize(("key", "place"), [("inputs", 0), ("targets", 13), ("targets", 31)])
def test_one_other_value_is_found(key, place):
    held, index = arrays(), probe_indices(100)[place]
    before = take_fingerprint(as_dataset(held))
    held[key][index] = held[key][index] + 1
    assert first_difference(before, take_fingerprint(as_dataset(held))) == (index, key)


@pytest.mark.parametrize("kind", ["float32", "complex64", "uint8", ">i4"])
def test_permuted_values_are_another_sample(kind):
    values = np.random.default_rng(0).integers(0, 2, 40).astype(kind)
    other = np.concatenate([values[1:], values[:1]])
    assert is_same(digest(values), digest(values.copy()))
    assert not is_same(digest(values), digest(other))
    assert not is_same(digest(values), digest(values.reshape(2, 20)))


def test_rounding_is_no_difference():
    values = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    assert is_same(digest(values), digest(np.nextafter(values, np.float32(9))))
    assert is_same(digest(values * 0), digest(values * 0))


@pytest.mark.parametrize("error", [BadSampleError("no JPEG"), ValueError("a bug")])
@pytest.mark.parametrize("skip", [False, True])
def test_samples_that_cannot_be_read_are_left_out(error, skip):
    def make(index):
        if index == 0:
            raise error
        return index

    found = take_fingerprint(as_dataset(Noting(50, make)), skip)
    replaced = skip and isinstance(error, BadSampleError)
    assert (found.samples["inputs"][0] is None) == (not replaced)
    assert None not in found.samples["inputs"][1:]
    assert first_difference(found, take_fingerprint(as_dataset(Noting(50, make)), skip)) is None
