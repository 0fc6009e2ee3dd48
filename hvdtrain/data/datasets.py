"""Data sets: one interface for arrays, data frames, data sets of other packages, anything indexable."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data import naming
from hvdtrain.data.collate import Collate, CollatedDataset, check_lengths
from hvdtrain.data.numeric import PAD_REMEDY, SEPARATOR, TARGETS, flatten, has_axes, is_nested, narrowed
from hvdtrain.data.serialization import memmap_base
from hvdtrain.errors import DataError, HvdtrainError
from hvdtrain.task import Arrays, Dataset
from hvdtrain.workers.user_errors import SAMPLE_NOTE

_NAMED = 3  # samples of a batch that an exception names

# the first argument of a method ``batch`` that makes batches instead of fetching samples
_SIZES = ("batch_size", "size", "n")


def as_dataset(
    source: Any,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    collate: Collate | None = None,
) -> Dataset:
    """Return a user's data as a Dataset.

    Args:
        source: a Dataset; a mapping of names to arrays of equal length; a pair (inputs, targets); a
            pandas or polars DataFrame; a Hugging Face data set; or anything with ``__len__`` and
            ``__getitem__`` whose items are mappings, (inputs, targets) pairs or single arrays, such
            as PyTorch's map-style data sets. Inputs can be a mapping or a tuple of arrays.
        inputs: the key (or column) that the model is given, or several; a key "inputs" if not given.
        targets: the key (or column) that the loss compares with; a key "targets", "labels" or "label"
            if not given.
        collate: a function from a list of samples to a batch: a mapping of names to arrays, or a
            pair (inputs, targets), such as ``hvdtrain.pad(...)``. Samples are stacked if not given.

    Raises:
        DataError: If ``source`` is none of these, arrays differ in length, or a key does not exist.
    """
    naming.check_supported(source)
    names = new_names(inputs, targets)
    if is_stream := hasattr(source, "with_collate"):
        source, collate = source.with_collate(collate), None
    if hasattr(source, "collated") or is_stream:
        return _final(source, names, collate)
    if collate is not None:
        return _collated(source, names, collate)
    if (of_arrays := _of_arrays(source, names)) is not None:
        return of_arrays
    if hasattr(source, "column_names") and hasattr(source, "with_format"):
        return naming.HuggingFaceDataset(source, names)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__"):
        return _final(source, names, None) if _has_own_batch(source) else ItemDataset(source, names)
    raise DataError(
        f"data must be arrays or have __len__ and __getitem__, found a {naming.type_name(source)}",
        "`hvdtrain docs data` lists what can be wrapped.",
    )


def _of_arrays(source: Any, names: Mapping[str, str]) -> "ArrayDataset | None":
    """Return a data set of what holds all samples in arrays, else None."""
    if naming.is_frame(source):
        columns, left_out = naming.columns_of(source)
        naming.check_kept(left_out, names)
        return ArrayDataset(naming.renamed(columns, names), naming.left_out_notes(left_out))
    if isinstance(source, tuple) and _is_of_arrays(source):
        source = _pair(source)
    if not isinstance(source, Mapping):
        return None
    given = naming.renamed(source, names)
    frames = {key: value for key, value in given.items() if naming.is_frame(value)}
    tables = {key: list(map(str, naming.names_of(frame))) for key, frame in frames.items()}
    return ArrayDataset({key: naming.as_array(key, value) for key, value in given.items()}, (), tables)


def new_names(inputs: str | Sequence[str] | None, targets: str | None) -> dict[str, str]:
    """Return the names that keys are given, as ``as_dataset`` has them."""
    if inputs is None or isinstance(inputs, str):
        names = {} if inputs is None else {inputs: "inputs"}
    else:
        names = {key: f"inputs{SEPARATOR}{key}" for key in inputs}
    return names if targets is None else {**names, targets: "targets"}


def _final(source: Any, names: Mapping[str, str], collate: Any) -> Dataset:
    """Return a data set that makes its batches itself; nothing can be requested of it."""
    if names or collate is not None:
        raise DataError(
            f"{naming.type_name(source)} makes its batches itself: inputs, targets and collate have no "
            "effect on it",
            "Name the keys in its batches, or give the data that it wraps.",
        )
    return source  # type: ignore[no-any-return]


def _collated(source: Any, names: Mapping[str, str], collate: Collate) -> CollatedDataset:
    """Return a data set whose batches a user's function makes."""
    if hasattr(source, "augmented"):
        raise DataError(
            f"collate cannot be combined with the augmentation of {naming.type_name(source)}",
            "Augment in collate, or leave it out.",
        )
    if naming.is_frame(source):
        source = {str(name): np.asarray(source[name]) for name in naming.names_of(source)}
    if isinstance(source, tuple) and len(source) == 2 and _is_of_arrays(source):
        source = _pair(source)
    if isinstance(source, Mapping):
        frames = {key: naming.as_array(key, value) for key, value in source.items() if naming.is_frame(value)}
        source = {**source, **frames}
    notes: tuple[str, ...] = getattr(collate, "notes", ())
    if hasattr(source, "features") and hasattr(source, "select_columns") and hasattr(collate, "columns"):
        kept, left_out = naming.number_columns(source)
        source, notes = source.select_columns(kept), (*notes, *naming.left_out_notes(left_out))
    return CollatedDataset(source, collate, lambda batch: naming.named(batch, names), notes)


def _is_of_arrays(source: tuple[Any, ...]) -> bool:
    """Return whether a tuple holds arrays with all samples, and is no sequence of samples."""
    if len(source) != 2:
        return bool(source) and all(hasattr(part, "shape") for part in source)
    return all(
        isinstance(part, list) or is_nested(part) or has_axes(part) or hasattr(part, "toarray")
        for part in source
    )


def _pair(source: tuple[Any, ...]) -> dict[str, Any]:
    if len(source) != 2:
        raise DataError(
            f"a tuple of arrays must hold (inputs, targets); found {len(source)} arrays",
            "Give a dict of names to arrays, or ((first, second), targets) for several inputs.",
        )
    return {"inputs": source[0], "targets": source[1]}


def _has_own_batch(source: Any) -> bool:
    """Return whether a data set has a method ``batch(indices)``, and none that makes batches of a size."""
    method = getattr(source, "batch", None)
    if not callable(method):
        return False
    try:
        parameters = inspect.signature(method).parameters.values()
    except (TypeError, ValueError):
        return True
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [p.name for p in parameters if p.default is p.empty and p.kind in positional]
    return len(required) == 1 and required[0] not in _SIZES


class ArrayDataset:
    """Samples in arrays, one array per name, along the first axis."""

    def __init__(
        self,
        arrays: Mapping[str, NDArray[Any]],
        notes: tuple[str, ...] = (),
        columns: Mapping[str, list[str]] = MappingProxyType({}),
    ) -> None:
        self.notes = notes
        self.columns = dict(columns)
        sizes = {name: len(array) if array.ndim else 0 for name, array in arrays.items()}
        check_lengths(sizes)
        self.arrays = dict(arrays)
        self._convert(naming.native)
        self._size = next(iter(sizes.values()), 0)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Arrays:
        return {name: array[index] for name, array in self.arrays.items()}

    def batch(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch many samples with one vectorised copy per name."""
        return {name: _rows(array, indices) for name, array in self.arrays.items()}

    def narrow(self) -> None:
        """Keep numbers of 64 bits in 32, as the model takes them, so that no batch needs to be converted."""
        self._convert(narrowed)

    def _convert(self, convert: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
        for name, array in self.arrays.items():
            if memmap_base(array) is None:  # others, which may not fit in memory, are converted by batches
                self.arrays[name] = convert(array)

    def reorder(self, name: str, columns: list[str]) -> None:
        """Put the columns of an array in another order, by their names."""
        places = [self.columns[name].index(column) for column in columns]
        self.arrays[name] = np.ascontiguousarray(self.arrays[name][:, places])
        self.columns[name] = columns


class ItemDataset:
    """Samples fetched one by one from an indexable source and stacked."""

    def __init__(self, source: Any, names: Mapping[str, str]) -> None:
        self._source = source
        self._names = names

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Arrays:
        return naming.arrays_of(naming.named(self._source[int(index)], self._names))


def fetch(dataset: Any, indices: NDArray[np.int64], keys: NDArray[np.uint64] | None = None) -> Arrays:
    """Fetch samples from any Dataset, stacked along a new first axis."""
    if keys is not None:
        with _noting(indices):
            arrays = dataset.augmented(indices, keys)
    elif read := getattr(dataset, "collated", None) or getattr(dataset, "batch", None):
        with _noting(indices):
            arrays = read(indices)
    else:
        samples = []
        for index in indices.tolist():
            with _noting([index]):
                samples.append(dataset[index])
        arrays = stack(samples, indices)
    if isinstance(arrays, Mapping) and any(map(is_nested, arrays.values())):
        arrays = flatten(arrays)
    found = {name: _for_frameworks(name, value) for name, value in arrays.items()}
    weights = found.get("weights", np.zeros(0))
    is_right = np.isfinite(weights) & (weights >= 0)
    if not is_right.all():
        place = int(np.argmin(is_right.reshape(len(indices), -1).all(1)))
        raise DataError(
            f"'weights' of a sample must be finite and not negative; sample {indices[place]} has "
            f"{weights[place]}",
            "Correct the weights, or name the key differently if it does not weigh samples.",
        )
    return found


@contextmanager
def _noting(indices: Any) -> Iterator[None]:
    """Return a context whose exceptions get a note of the samples that were being read."""
    try:
        yield
    except HvdtrainError:
        raise
    except Exception as error:
        shown = ", ".join(str(index) for index in indices[:_NAMED])
        more = f" or {len(indices) - _NAMED} others" if len(indices) > _NAMED else ""
        error.add_note(f"{SAMPLE_NOTE}{shown}{more}")
        raise


def stack(samples: list[Any], indices: NDArray[np.int64]) -> Arrays:
    """Return samples stacked along a new first axis."""
    first = samples[0]
    result = {}
    for name in first:
        values = [np.asarray(sample[name]) if name in sample else None for sample in samples]
        for index, value in zip(indices, values, strict=True):
            if value is None or value.shape != values[0].shape:  # type: ignore[union-attr]
                found = "is missing" if value is None else f"has shape {value.shape}"
                raise DataError(
                    f"samples of one batch must have equal shapes: {name!r} of sample {index} {found}, "
                    f"that of sample {indices[0]} has shape {values[0].shape}",  # type: ignore[union-attr]
                    PAD_REMEDY,
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
    """Check that a data set can be used and return the shape and type of its samples."""
    size = len(dataset)
    if size == 0:
        raise DataError(f"the {what} is empty (0 samples)", "Check the path or the filter that selects it.")
    first = np.zeros(1, np.int64)
    sample = fetch_one(first) if fetch_one else fetch(dataset, first)
    if not isinstance(sample, Mapping) or not sample:
        raise DataError(f"a sample of the {what} must map names to arrays, found {type(sample).__name__}")
    for name, value in sample.items():
        if value.dtype.kind not in "biufc":
            way = "with .astype('float32')"
            if value.dtype.kind in "mM":
                way = "(times - times.min()) / np.timedelta64(1, 'D')"
            raise DataError(
                f"the {what} holds {value.dtype} under {name!r}; it must be numbers",
                f"Convert it, such as {way}, or leave it out of the samples.",
            )
    return {name: f"{value.dtype}{list(value.shape[1:])}" for name, value in sorted(sample.items())}


def _for_frameworks(name: str, value: Any) -> NDArray[Any]:
    naming.check_unmasked(name, value)
    array = naming.canonical(value)
    if array.dtype.kind not in "iu" or name.partition(SEPARATOR)[0] not in TARGETS:
        return array
    if array.dtype == np.uint64 and (array >> np.uint64(63)).any():
        raise DataError(
            f"{name!r} has the whole number {array.max()}, which 64 bits with a sign do not hold",
            "Number its values from 0 in the data set, such as with np.unique(..., return_inverse=True).",
        )
    return array.astype(np.int64)  # as PyTorch's losses take class numbers
