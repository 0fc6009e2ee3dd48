"""Batches that a function makes of samples, and padding samples of unequal lengths to a few lengths."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.naming import check_unmasked, named, type_name
from hvdtrain.data.numeric import flatten, nesting
from hvdtrain.data.order import ordering_of
from hvdtrain.errors import DataError
from hvdtrain.task import Arrays

Collate = Callable[[list[Any]], Any]


def collated(collate: Collate, samples: list[Any], name: Callable[[Any], Arrays]) -> Arrays:
    """Return the batch that a user's function makes of samples."""
    batch = name(collate(samples))
    for key, value in batch.items():
        check_unmasked(key, value)
    arrays = {key: np.asarray(value) for key, value in batch.items()}
    for key, array in arrays.items():
        if array.ndim == 0 or len(array) != len(samples):
            raise DataError(
                f"collate was given {len(samples)} samples and returned {key!r} of shape {array.shape}",
                "It must return arrays whose first axis is the samples.",
            )
    return arrays


class CollatedDataset:
    """Samples whose batches a user's function makes: one for all micro-batches of a step."""

    def __init__(
        self, source: Any, collate: Collate, name: Callable[[Any], Arrays], notes: tuple[str, ...] = ()
    ) -> None:
        self.notes = notes
        self.ordering = ordering_of(source)
        self._columns = flatten(source) if isinstance(source, Mapping) else None
        self._nest = nesting(self._columns or ())
        self._source = source
        self._collate = collate
        self._name = name
        if self._columns is not None:
            check_lengths({key: len(value) for key, value in self._columns.items()})
        elif not hasattr(source, "__len__") or not hasattr(source, "__getitem__"):
            raise DataError(
                f"data must be arrays or have __len__ and __getitem__, found a {type_name(source)}"
            )

    def __len__(self) -> int:
        if self._columns is None:
            return len(self._source)
        return len(next(iter(self._columns.values()), ()))

    def __getitem__(self, index: int) -> Arrays:
        return {name: array[0] for name, array in self.collated(np.asarray([index])).items()}

    def collated(self, indices: NDArray[np.int64]) -> Arrays:
        """Fetch samples and return the batch that the function makes of them."""
        return collated(self._collate, [self._sample(int(index)) for index in indices], self._name)

    def _sample(self, index: int) -> Any:
        if self._columns is None:
            return self._source[index]
        sample = {name: values[index] for name, values in self._columns.items()}
        return sample if self._nest is None else self._nest(sample)


class Pad:
    """A function for ``collate`` that pads samples of unequal lengths along their first axis.

    The model must ignore what is padded, by its mask, for the result not to depend on which samples
    are in a batch together: pad the mask with 0 and labels with -100.

    Args:
        columns: the columns to pad, with the value that fills each, such as ``{"input_ids": 0,
            "attention_mask": 0, "labels": -100}``; other columns are stacked.
        multiple: pad to the next multiple of this length; to the next power of two by default. In
            TensorFlow and with ``--compile``, each length is compiled once.
        longest: the greatest length, such as the number of the model's positions.
    """

    def __init__(
        self, columns: Mapping[str, float], *, multiple: int | None = None, longest: int | None = None
    ) -> None:
        if not columns:
            raise DataError("pad needs the columns to pad, such as hvdtrain.pad({'input_ids': 0})")
        for name, value in (("multiple", multiple), ("longest", longest)):
            if value is not None and value < 1:
                raise DataError(f"pad: {name} must be 1 or more, found {value}")
        self.columns = dict(columns)
        note = f"no mask among the padded columns {', '.join(columns)}: the model must ignore padding"
        self.notes = () if any("mask" in name for name in columns) else (note,)
        self._multiple = multiple
        self._longest = longest

    def __call__(self, samples: list[Any]) -> Arrays:
        """Return the samples as a batch."""
        flat = [named(sample, {}) for sample in samples]
        names = self.columns.keys() | flat[0].keys()
        for sample in flat:
            if lost := sorted(names - sample.keys()):
                raise DataError(f"pad: a sample has no column {lost[0]!r}; it has {sorted(sample)}")
        return {name: self._column(name, [np.asarray(sample[name]) for sample in flat]) for name in flat[0]}

    def length(self, length: int) -> int:
        """Return the length to which samples are padded, the longest of which has this one."""
        if self._longest is not None and length > self._longest:
            raise DataError(
                f"pad: a sample has length {length}, and longest is {self._longest}",
                "Truncate samples, such as in the tokenizer, or raise longest.",
            )
        padded = 1 << max(length - 1, 0).bit_length()
        if self._multiple:
            padded = -(-length // self._multiple) * self._multiple
        return padded if self._longest is None else min(padded, self._longest)

    def _column(self, name: str, values: list[NDArray[Any]]) -> NDArray[Any]:
        pads = name in self.columns
        if pads and values[0].ndim == 0:
            raise DataError(f"pad: {name!r} is one number for each sample; only sequences can be padded")
        shapes = sorted({value.shape[pads:] for value in values})
        if len(shapes) > 1:
            raise DataError(
                f"pad: samples of one batch have {name!r} of shapes {shapes[0]} and {shapes[1]}"
                + (" beyond the first axis" if pads else ""),
                "Only the first axis is padded." if pads else f"Name it among the columns to pad: {name!r}.",
            )
        if not pads:
            return np.stack(values)
        size, fill = self.length(max(len(value) for value in values)), self.columns[name]
        # an empty list becomes an array of floats
        kind = np.result_type(*({value.dtype for value in values if value.size} or {np.dtype(np.int64)}))
        with np.errstate(invalid="ignore"):
            fits = np.asarray(fill).astype(kind) == fill
        kind = kind if fits else np.result_type(kind, np.min_scalar_type(fill))
        padded = np.full((len(values), size, *shapes[0]), fill, kind)
        for row, value in zip(padded, values, strict=True):
            row[: len(value)] = value
        return padded


pad = Pad


def check_lengths(sizes: Mapping[str, int]) -> None:
    """Check that the columns of a data set have equal numbers of samples."""
    if len(set(sizes.values())) > 1:
        raise DataError(
            f"arrays of one data set must have equal lengths, found {sizes}",
            "eval_data() with several sets returns hvdtrain.EvalSets({name: set}).",
        )
