"""What users' data become: arrays by flat names, and what is said of those that cannot."""

import numbers
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.numeric import flatten, float_bits, is_numeric, narrowed, ragged_error
from hvdtrain.errors import DataError
from hvdtrain.task import Arrays

_STREAM = (
    "It is a stream: wrap it, hvdtrain.stream(data, length=...), or give arrays, or an object with __len__ "
    "and __getitem__ that returns one sample, which allow more (`hvdtrain docs streams`)"
)
# by package and class, which may be a base class: what to do
_REMEDIES = {
    "hvdtrain.EvalSets": "Only eval_data() returns EvalSets, as they are; a set in them is a data set.",
    "torch.DataLoader": "Give its data set (loader.dataset): hvdtrain batches, shuffles and shards it; a "
    "collate_fn is given as hvdtrain.as_dataset(data, collate=...). A sampler is lost with the loader: "
    "return the weights of a WeightedRandomSampler in the task's method sample_probabilities().",
    "torch.IterableDataset": f"{_STREAM}.",
    **dict.fromkeys(
        ("datasets.DatasetDict", "datasets.IterableDatasetDict"),
        "It is a set of splits: return one of them, such as data['train']. eval_data() can return several: "
        "hvdtrain.EvalSets(validation=data['validation'], test=data['test']).",
    ),
    "datasets.IterableDataset": f"{_STREAM}, or load it without streaming=True.",
    "keras.PyDataset": "Its items are batches. Give its arrays, or an object whose __getitem__ returns one "
    "sample: hvdtrain batches, shuffles and shards it.",
    "tensorflow.DatasetV2": f"{_STREAM}. If it fits in memory: "
    "list(data.unbatch().as_numpy_iterator()), without unbatch() if it is not batched.",
    "polars.LazyFrame": "Call its .collect().",
    "pyarrow.Table": "Give datasets.Dataset(table), or table.to_pandas().",
}
# that give batches, each of which would be taken for a sample
_BATCHES = ("torch.DataLoader", "keras.PyDataset")


def type_name(value: Any) -> str:
    """Return the type of a value with its module, such as "torch.utils.data.dataloader.DataLoader"."""
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def has_class(value: Any, name: str) -> bool:
    """Return whether a value's class, or a base class, has this name, such as "pandas.DataFrame"."""
    return name in _names(value)


def check_supported(source: Any) -> None:
    """Check that an object is none of those that hold samples in a form that hvdtrain cannot use."""
    remedy = next((_REMEDIES[name] for name in _names(source) if name in _REMEDIES), "")
    if not remedy and hasattr(source, "__next__"):
        remedy = (
            "It can be passed over only once. Give a list, or a function that returns a new one: "
            "hvdtrain.stream(make_samples, length=...)."
        )
    if remedy:
        raise DataError(f"data must be samples that can be indexed; found {type_name(source)}", remedy)


def check_no_batches(source: Any) -> None:
    """Check that what is to be a stream gives samples, as far as its class tells."""
    if has_class(source, "tensorflow.DatasetV2") and _is_batched(source):
        raise DataError(
            "a stream's items are samples; those of this tf.data pipeline are batches",
            "Leave out batch(), or give pipeline.unbatch(): hvdtrain makes the batches (--batch-size).",
        )
    if name := next((name for name in _names(source) if name in _BATCHES), None):
        raise DataError(
            f"a stream's items are samples; those of {type_name(source)} are batches", _REMEDIES[name]
        )


def check_unmasked(name: str, value: Any) -> None:
    """Check that no value of an array is masked: frameworks do not know masks."""
    if isinstance(value, np.ma.MaskedArray) and np.ma.getmaskarray(value).any():
        raise DataError(
            f"{name!r} is a masked array, and a batch has no mask",
            "Fill them, .filled(value), and give the mask under a key of its own if the model needs it. "
            "Targets can be filled with the task's ignore_index.",
        )


def _is_batched(pipeline: Any) -> bool:
    """Return whether the last operation of a tf.data pipeline that makes or takes batches makes them."""
    while True:
        name = type(pipeline).__name__.lower()
        if "batch" in name:
            return "unbatch" not in name
        inputs = pipeline._inputs()
        if len(inputs) != 1 or any(part in name for part in ("flatmap", "interleave", "window")):
            return False
        pipeline = inputs[0]


def _names(value: Any) -> list[str]:
    return [f"{kind.__module__.partition('.')[0]}.{kind.__name__}" for kind in type(value).__mro__]


def is_frame(source: Any) -> bool:
    """Return whether an object is a data frame of pandas or polars, or a structured array."""
    if isinstance(source, np.ndarray):
        return source.dtype.names is not None
    return has_class(source, "pandas.DataFrame") or has_class(source, "polars.DataFrame")


def names_of(frame: Any) -> list[Any]:
    """Return the names of a frame's columns."""
    return list(frame.dtype.names if isinstance(frame, np.ndarray) else frame.columns)


def columns_of(frame: Any) -> tuple[dict[str, NDArray[Any]], list[str]]:
    """Return a frame's columns of numbers, and the names of those that are left out, such as text."""
    arrays = {str(name): _column(frame, name) for name in names_of(frame)}
    left_out = [name for name, array in arrays.items() if array.dtype.kind not in "biufc"]
    return {name: array for name, array in arrays.items() if name not in left_out}, left_out


def _column(frame: Any, name: Any) -> NDArray[Any]:
    column = frame[name]
    if isinstance(column, np.ndarray):
        return column
    if getattr(column, "ndim", 1) > 1:
        raise DataError(f"a data frame has several columns named {name!r}", "Rename them.")
    array = np.asarray(column.to_numpy())
    if array.dtype == object and any(isinstance(v, numbers.Number) and str(v) != "nan" for v in array):
        raise DataError(
            f"the column {name!r} of a data frame mixes numbers with other or missing values, type "
            f"{column.dtype}",
            f"Fill in or drop missing values, then convert it: frame[{str(name)!r}].astype('float32').",
        )
    return array


def renamed(item: Mapping[Any, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a mapping with hvdtrain's names, flat."""
    if not names:
        return flatten(item)
    result = {names.get(str(key), str(key)): value for key, value in item.items()}
    if len(result) < len(item):
        raise DataError(
            f"two keys of {[str(key) for key in item]} would have the same name; {dict(names)} are renamed",
            "Remove or rename one of them.",
        )
    keys = {str(key) for key in item}
    missing = next((key for key in names if key not in keys), None)
    if missing is not None:
        raise DataError(
            f"the data has no column {missing!r}; it has {sorted(keys)}",
            "Name its columns: hvdtrain.as_dataset(data, inputs='image', targets='label').",
        )
    return flatten(result)


def named(item: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """Return a sample, or a batch that collate made, as a mapping of flat names to values."""
    if isinstance(item, Mapping):
        return renamed(item, names)
    if isinstance(item, (tuple, list)):
        if len(item) != 2:
            raise DataError(
                f"a sample that is a {type(item).__name__} must hold (inputs, targets); "
                f"found {len(item)} parts",
                "Return a dict with the keys 'inputs' and 'targets' instead.",
            )
        return flatten({"inputs": item[0], "targets": item[1]})
    return flatten({"inputs": item})


def left_out_notes(columns: Sequence[str]) -> tuple[str, ...]:
    """Return what to tell a user of columns that are left out."""
    what = f"columns {', '.join(columns)} are" if len(columns) > 1 else f"column {', '.join(columns)} is"
    return (f"the {what} left out: not numbers",) if columns else ()


def check_kept(left_out: Sequence[str], names: Mapping[str, str]) -> None:
    """Check that no column that was named is left out."""
    lost = next((key for key in names if key in left_out), None)
    if lost is not None:
        raise DataError(
            f"the column {lost!r}, which becomes {names[lost]!r}, does not hold numbers",
            "Encode it, such as class names as 0, 1, 2, ...",
        )


def as_array(name: str, value: Any) -> NDArray[Any]:
    """Return what a user gave for a name as an array; of a frame (rows, columns)."""
    if hasattr(value, "toarray") and hasattr(value, "nnz"):
        raise DataError(
            f"{name!r} is a sparse {type_name(value)}; samples are dense arrays",
            "Convert it with .toarray(), or row by row in the __getitem__ of a data set.",
        )
    check_unmasked(name, value)
    if not is_frame(value):
        try:
            return np.asarray(value)
        except ValueError as error:  # lists of lists of unequal lengths
            raise ragged_error(name, value, range(len(value))) from error
    arrays, left_out = columns_of(value)
    if left_out:
        raise DataError(
            f"{name!r} is a data frame with columns that are not numbers: {', '.join(left_out)}",
            "Drop or encode them.",
        )
    matrix = np.stack(list(arrays.values()), axis=1) if arrays else np.zeros((len(value), 0))
    large = (key for key, one in arrays.items() if one.dtype.kind in "iu" and np.any(np.abs(one / 2**53) > 1))
    if matrix.dtype.kind == "f" and (column := next(large, None)):
        raise DataError(
            f"the column {column!r} of {name!r} has whole numbers above 2**53, which fractions round",
            "Number its values from 0, such as with pandas.factorize, or give it by itself.",
        )
    return matrix


def native(array: Any) -> NDArray[Any]:
    """Return an array in the machine's byte order, and of at most 64 bits."""
    result = np.asarray(array)
    if result.dtype.kind == "f" and result.dtype.itemsize > 8:
        return result.astype(np.float64)
    return result if result.dtype.isnative else result.astype(result.dtype.newbyteorder("="))


def canonical(array: Any) -> NDArray[Any]:
    """Return an array in a type that both frameworks can use (see ``set_float_bits``)."""
    return native(array) if float_bits() == 64 else narrowed(native(array))


def arrays_of(sample: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Return a sample's values as arrays that both frameworks can use."""
    for name, value in sample.items():
        check_unmasked(name, value)
    return {name: canonical(value) for name, value in sample.items()}


class NumericColumns:
    """Makes arrays of samples, without columns that hold no numbers, once it has seen a sample."""

    def __init__(self, names: Mapping[str, str]) -> None:
        self._names = names
        self._left_out: frozenset[Hashable] = frozenset()
        self.notes: tuple[str, ...] = ()

    def learn(self, sample: Mapping[Any, Any], place: str) -> None:
        """Leave out what holds no numbers in a sample; without a note if it begins with two underscores."""
        left_out = [name for name, value in sample.items() if not is_numeric(value)]
        texts = [str(name) for name in left_out]
        check_kept(texts, self._names)
        if len(left_out) == len(sample):
            raise DataError(
                f"no column of {place} holds numbers; it has {sorted(texts)}",
                "Give decode, a function that makes a sample of it.",
            )
        self._left_out = frozenset(left_out)
        self.notes = left_out_notes([text for text in texts if not text.startswith("__")])

    def arrays(self, item: Any) -> Arrays:
        """Return a sample, in any form that a data set may return, as arrays by name."""
        if self._left_out:
            item = {name: value for name, value in item.items() if name not in self._left_out}
        return arrays_of(named(item, self._names))


# types of Hugging Face's columns that hold no numbers, by their beginning
_OTHERS = ("string", "large_string", "binary", "large_binary", "date", "time", "duration", "null", "dict")


class HuggingFaceDataset:
    """A Hugging Face data set read as numpy arrays, a batch per query; columns of text are left out."""

    def __init__(self, source: Any, names: Mapping[str, str]) -> None:
        kept, left_out = number_columns(source)
        check_kept(left_out, names)
        renamed(dict.fromkeys(kept), names)  # raises if a name does not exist
        self.notes = left_out_notes(left_out)
        self._source = source.select_columns(kept).with_format("numpy")
        self._names = names

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Arrays:
        return {name: column[0] for name, column in self.batch(np.asarray([index])).items()}

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples with one query."""
        columns = self._source[indices.tolist()]
        for name, value in columns.items():
            # lists of unequal lengths come as an array of arrays
            if value.dtype == object and len({np.shape(sample) for sample in value}) > 1:
                raise ragged_error(name, value, indices.tolist())
        return {name: canonical(value) for name, value in renamed(columns, self._names).items()}


def number_columns(source: Any) -> tuple[list[str], list[str]]:
    """Return the columns of a Hugging Face data set that hold numbers or images, and the others."""
    columns = source.format["columns"] or source.column_names
    left_out = [name for name in columns if not _holds_numbers(source.features[name])]
    return [name for name in columns if name not in left_out], left_out


def _holds_numbers(feature: Any) -> bool:
    if isinstance(feature, Mapping):
        return False
    if isinstance(feature, list):
        return all(map(_holds_numbers, feature))
    inner = getattr(feature, "feature", None)
    if inner is not None:
        return _holds_numbers(inner)
    return not str(getattr(feature, "dtype", "")).startswith(_OTHERS)
