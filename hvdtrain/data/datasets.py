"""Data sets: one interface for arrays, PyTorch and Hugging Face data sets and anything indexable."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.memory_map import memmap_base
from hvdtrain.errors import DataError
from hvdtrain.task import Arrays, Dataset


def as_dataset(source: Any, inputs: str = "inputs", targets: str = "targets") -> Dataset:
    """Return a user's data as a Dataset.

    Args:
        source: a Dataset; a mapping of names to arrays of equal length; a pair of arrays (inputs,
            targets); a Hugging Face data set; or anything with ``__len__`` and ``__getitem__``
            whose items are mappings, (inputs, targets) pairs or single arrays, such as PyTorch's
            map-style data sets.
        inputs: the key (or column) that the model is given.
        targets: the key (or column) that the loss compares with.

    Raises:
        DataError: If ``source`` is none of these, or arrays differ in length.
    """
    names = {inputs: "inputs", targets: "targets"}
    if isinstance(source, Mapping):
        return ArrayDataset(_renamed({key: _as_array(key, value) for key, value in source.items()}, names))
    if isinstance(source, tuple) and source and all(hasattr(part, "shape") for part in source):
        if len(source) != 2:
            raise DataError(
                f"a tuple of arrays must hold (inputs, targets); found {len(source)} arrays",
                "Give a dict of names to arrays instead.",
            )
        return ArrayDataset({"inputs": np.asarray(source[0]), "targets": np.asarray(source[1])})
    if hasattr(source, "column_names") and hasattr(source, "with_format"):
        return HuggingFaceDataset(source, names)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return source if hasattr(source, "batch") else ItemDataset(source, names)
    raise DataError(
        f"data must be arrays or have __len__ and __getitem__, found a {type(source).__name__}",
        "docs/tasks.md lists what can be wrapped.",
    )


def _renamed(item: Mapping[Any, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return a mapping with hvdtrain's names.

    Raises:
        DataError: If two of its keys would have the same name.
    """
    result = {names.get(str(key), str(key)): value for key, value in item.items()}
    if len(result) < len(item):
        raise DataError(
            f"two keys of {[str(key) for key in item]} would have the same name; {dict(names)} are renamed",
            "Remove or rename one of them.",
        )
    return result


def _as_array(name: object, value: Any) -> NDArray[Any]:
    try:
        return np.asarray(value)
    except ValueError as error:  # lists of lists of unequal lengths
        raise DataError(f"{str(name)!r} cannot be made an array: {error}") from None


class ArrayDataset:
    """Samples in arrays, one array per name, along the first axis."""

    def __init__(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        sizes = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        if len(set(sizes.values())) > 1:
            raise DataError(f"arrays of one data set must have equal lengths, found {sizes}")
        # memory-mapped arrays are converted batch by batch: a whole copy may not fit in memory
        self._arrays = {name: a if memmap_base(a) is not None else canonical(a) for name, a in arrays.items()}
        self._size = next(iter(sizes.values()), 0)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Arrays:
        return {name: array[index] for name, array in self._arrays.items()}

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples with one vectorised copy per name."""
        return {name: _rows(array, indices) for name, array in self._arrays.items()}


class ItemDataset:
    """Samples fetched one by one from an indexable source and stacked."""

    def __init__(self, source: Any, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = names

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Arrays:
        item = self._source[int(index)]
        if isinstance(item, Mapping):
            named = _renamed(item, self._names)
        elif isinstance(item, (tuple, list)) and len(item) == 2:
            named = {"inputs": item[0], "targets": item[1]}
        elif isinstance(item, (tuple, list)):
            raise DataError(
                f"a sample that is a {type(item).__name__} must hold (inputs, targets); "
                f"found {len(item)} parts",
                "Return a dict with the keys 'inputs' and 'targets' instead.",
            )
        else:
            named = {"inputs": item}
        return {name: canonical(value) for name, value in named.items()}


class HuggingFaceDataset:
    """A Hugging Face data set read as numpy arrays, a batch per query."""

    def __init__(self, source: Any, names: Mapping[str, str]) -> None:
        missing = [column for column in names if column not in source.column_names]
        if missing:
            raise DataError(
                f"the data set has no column {missing[0]!r}; its columns are {source.column_names}",
                "Name them: hvdtrain.as_dataset(data, inputs='image', targets='label').",
            )
        self._source = source.with_format("numpy")
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
            shapes = {np.shape(sample) for sample in value} if value.dtype == object else {()}
            if len(shapes) > 1:
                raise DataError(
                    f"samples of one batch must have equal shapes: column {name!r} has {sorted(shapes)}"
                )
        return {name: canonical(value) for name, value in _renamed(columns, self._names).items()}


def fetch(dataset: Any, indices: NDArray[np.int64], keys: NDArray[np.uint64] | None = None) -> Arrays:
    """Fetch samples from any Dataset, stacked along a new first axis.

    Args:
        dataset: the data set.
        indices: which samples, one-dimensional.
        keys: the seeds of their augmentation, or None to fetch them without it.

    Raises:
        DataError: If samples differ in shape, or a weight is negative or no number.
    """
    if keys is not None:
        arrays = dataset.augmented(indices, keys)
    elif hasattr(dataset, "batch"):
        arrays = dataset.batch(indices)
    else:
        arrays = stack([dataset[int(index)] for index in indices], indices)
    found = {name: _for_frameworks(name, value) for name, value in arrays.items()}
    if "weights" in found:
        _check_weights(found["weights"], indices)
    return found


def _check_weights(weights: NDArray[Any], indices: NDArray[np.int64]) -> None:
    is_right = np.isfinite(weights) & (weights >= 0)
    if not is_right.all():
        place = int(np.argmin(is_right.reshape(len(indices), -1).all(1)))
        raise DataError(
            f"'weights' of a sample must be finite and not negative; sample {indices[place]} has "
            f"{weights[place]}",
            "Correct the weights, or name the key differently if it does not weigh samples.",
        )


def stack(samples: list[Any], indices: NDArray[np.int64]) -> Arrays:
    """Return samples stacked along a new first axis.

    Raises:
        DataError: If their keys or shapes differ, naming the first such sample.
    """
    first = samples[0]
    result = {}
    for name in first:
        values = [np.asarray(sample[name]) if name in sample else None for sample in samples]
        for index, value in zip(indices, values, strict=True):
            if value is None or value.shape != values[0].shape:  # type: ignore[union-attr]
                found = "is missing" if value is None else f"has shape {value.shape}"
                raise DataError(
                    f"samples of one batch must have equal shapes: {name!r} of sample {index} {found}, "
                    f"that of sample {indices[0]} has shape {values[0].shape}"  # type: ignore[union-attr]
                )
        result[name] = np.stack(values)  # type: ignore[arg-type]
    return result


def _rows(array: NDArray[Any], indices: NDArray[np.int64]) -> NDArray[Any]:
    # take() is faster, but converts the whole array first unless its layout is the machine's own
    plain = array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative
    return array.take(indices, axis=0) if plain else array[indices]


def signature(
    dataset: Any, what: str, fetch_one: Callable[[NDArray[np.int64]], Arrays] | None = None
) -> dict[str, str]:
    """Check that a data set can be used and return the shape and type of its samples.

    Args:
        dataset: the data set.
        what: its name in messages, such as "training data".
        fetch_one: returns a sample by its index; ``fetch`` by default.

    Raises:
        DataError: If it is empty, cannot be read or has samples that are not arrays of numbers.
    """
    size = len(dataset)
    if size == 0:
        raise DataError(f"the {what} is empty (0 samples)", "Check the path or the filter that selects it.")
    first = np.zeros(1, np.int64)
    sample = fetch_one(first) if fetch_one else fetch(dataset, first)
    if not isinstance(sample, Mapping) or not sample:
        raise DataError(f"a sample of the {what} must map names to arrays, found {type(sample).__name__}")
    for name, value in sample.items():
        if value.dtype.kind not in "biufc":
            raise DataError(f"the {what} holds {value.dtype} under {name!r}; it must be numbers")
    return {name: f"{value.dtype}{list(value.shape[1:])}" for name, value in sorted(sample.items())}


def canonical(array: Any) -> NDArray[Any]:
    """Return an array in a type that both frameworks can use.

    64-bit floats are converted to 32 bits, and the bytes to the machine's own order.
    """
    result = np.asarray(array)
    if result.dtype.kind == "f" and result.dtype.itemsize == 8:
        return result.astype(np.float32)
    return result if result.dtype.isnative else result.astype(result.dtype.newbyteorder("="))


def _for_frameworks(name: str, value: Any) -> NDArray[Any]:
    array = canonical(value)
    # PyTorch's losses take class numbers as int64
    return array.astype(np.int64) if name == "targets" and array.dtype.kind in "iu" else array
