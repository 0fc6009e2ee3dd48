"""Streams: samples that can only be read one after the other."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from hashlib import blake2b
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from hvdtrain.data.collate import Collate, collated
from hvdtrain.data.datasets import fetch, new_names, stack
from hvdtrain.data.naming import NumericColumns, named
from hvdtrain.data.stream_sources import Source, shard_numbers, shuffled, source_of
from hvdtrain.data.unsupported import type_name
from hvdtrain.errors import DataError
from hvdtrain.storage.text import counted
from hvdtrain.task import Arrays

_MOST = 64  # bytes or numbers of a value that are looked at, evenly over it
_MOST_PARTS = 16  # of a list
_TOLERANCE = 1e-5  # relative; hosts round floating-point numbers differently

# checksum of text, bytes and integers; a weighted sum of the other numbers, and that of their sizes
Summary = tuple[int, float, float]


class Trace:
    """What was read so far: other items, or the same in another order, have another summary."""

    def __init__(self) -> None:
        self._checksum, self._sum, self._size, self._values = 0, 0.0, 0.0, 0

    @property
    def summary(self) -> Summary:
        """What is to be compared."""
        return self._checksum, self._sum, self._size

    def add(self, item: Any) -> None:
        """Take an item of the source, not decoded; of a large one, parts that are spread over it."""
        item = list(item.items()) if isinstance(item, dict) else item
        if isinstance(item, list | tuple):
            self._take(b"%d" % len(item))
            for value in item[:: len(item) // _MOST_PARTS + 1]:
                self.add(value)
            return
        item = item.encode(errors="replace") if isinstance(item, str) else item
        array = np.asarray(None)
        if isinstance(item, bytes | bytearray):
            array = np.frombuffer(item, np.uint8)
        elif isinstance(item, int | float | np.ndarray | np.generic) or type_name(item).startswith("torch."):
            with suppress(Exception):  # on a device, or with a gradient
                array = np.asarray(item)
        values = array.reshape(-1)[:: array.size // _MOST + 1]
        is_exact = array.dtype.kind in "biuSU"
        # of another package, such as an image that is decoded when it is looked at, the type alone
        what = type_name(item) if array.dtype == object else str(array.shape)
        self._take(what.encode(), values.tobytes() if is_exact else b"")
        if array.dtype.kind == "f":
            weights = 1 + (self._values + np.arange(len(values))) * 0.6180339887 % 1
            self._values += len(values)
            values = np.where(np.isfinite(values), values, 0).astype(np.float64)
            self._sum += float(weights @ values)
            self._size += float(weights @ np.abs(values))

    def _take(self, *parts: bytes) -> None:
        self._checksum = crc32(b"".join(parts), self._checksum)


def summary_of(item: Any) -> Summary:
    """Return the summary of one item."""
    trace = Trace()
    trace.add(item)
    return trace.summary


def are_alike(summaries: Sequence[Summary]) -> bool:
    """Return whether workers read the same items in one order, but for rounding."""
    first = summaries[0]
    return all(
        one[0] == first[0] and abs(one[1] - first[1]) <= _TOLERANCE * max(one[2], first[2])
        for one in summaries
    )


# what stands for the length of a stream where a number is needed; no run gets there
UNKNOWN_LENGTH = 1 << 40
_CHANGES = (
    "two passes over the stream began with different samples; if it shuffles by itself, a resumed run has "
    "some samples twice and others never: let shuffle_buffer do it, or seed each pass in set_epoch(number)"
)


def stream(
    source: Any,
    inputs: str | Sequence[str] | None = None,
    targets: str | None = None,
    *,
    shards: Sequence[Any] | None = None,
    length: int | None = None,
    shuffle_buffer: int = 0,
    decode: Callable[[Any], Any] | None = None,
    collate: Collate | None = None,
) -> "Stream":
    """Return data that can only be read one sample after the other.

    Args:
        source: an iterable of samples that can be passed over again, such as a streamed data set of Hugging
            Face, a torch IterableDataset or a tf.data pipeline; a function that returns one; a path, pattern
            or URL of tars; or, with ``shards``, a function that returns the samples of a shard.
        inputs: the key that the model is given, or several.
        targets: the key that the loss compares with.
        shards: what the function opens, such as paths; they are divided among the workers.
        length: the number of samples of an epoch. Without it, give ``--steps``.
        shuffle_buffer: samples among which the next one is drawn in training; 0 leaves the order as it is.
        decode: makes a sample of what the source gives, on the worker that trains on it.
        collate: makes a batch of a list of samples.

    Raises:
        DataError: If the source cannot be passed over more than once, or is no stream.
    """
    for name, value, least in (("length", length, 1), ("shuffle_buffer", shuffle_buffer, 0)):
        if value is not None and (not isinstance(value, int) or value < least):
            raise DataError(f"stream: {name} must be a whole number of {least} or more, found {value!r}")
    found = source_of(source, shards, decodes=decode is None)
    names = new_names(inputs, targets)
    return Stream(found, names, length, buffer=shuffle_buffer, decode=decode, collate=collate)


class Stream:
    """Samples that can only be read one after the other; see :func:`stream`.

    It has the form of a data set whose first sample alone can be read by its index.

    Attributes:
        length: the declared number of samples of an epoch, or None.
        shuffle_buffer: samples among which the next one is drawn.
        seen: the number that the last whole pass had; None before.
        notes: what to report to the user.
    """

    def __init__(
        self,
        source: Source,
        names: dict[str, str],
        length: int | None,
        *,
        buffer: int,
        decode: Callable[[Any], Any] | None,
        collate: Collate | None,
    ) -> None:
        self._source, self._names, self.shuffle_buffer = source, names, buffer
        self._decode, self._collate = decode, collate
        self.length = length
        self.seen: int | None = None
        self.notes: tuple[str, ...] = ()
        self._columns = NumericColumns(names)
        self._first: list[Any] = []

    def __len__(self) -> int:
        return self.length or UNKNOWN_LENGTH

    def __getitem__(self, index: int) -> Arrays:
        if index != 0:
            raise DataError(f"sample {index} of a stream cannot be read by its index, only the first one")
        return {name: array[0] for name, array in self.batch_of([self.first()]).items()}

    @property
    def order_identity(self) -> str:
        """A text that is equal if the order of training is, at one number of workers."""
        text = " ".join(f"stream {self._source.name} {self._source.identity} {self.shuffle_buffer}".split())
        return blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def shards(self) -> int:
        """How many parts can be read apart; 0 if the stream cannot be divided."""
        return self._source.shards

    def is_dealt(self, workers: int) -> bool:
        """Return whether each of several workers reads shards of its own; otherwise each reads everything."""
        return 1 < workers <= self._source.shards

    def with_collate(self, collate: Collate | None) -> "Stream":
        """Return the stream with a function that makes its batches."""
        if collate is None:
            return self
        found = copy(self)
        found._collate, found._first, found.notes = collate, [], ()
        return found

    def first(self) -> Any:
        """Return the first sample, decoded; it is read once."""
        if not self._first:
            item = self._begin()
            self._first.append(self.decoded(item))
            self._leave_out(self._first[0])
            if not are_alike([summary_of(item), summary_of(self._begin())]):
                self.notes += (_CHANGES,)
        return self._first[0]

    def _begin(self) -> Any:
        """Return what the source gives first."""
        for item in self._source.open(0, None):
            return item
        raise DataError(
            f"the stream ({self._source.name}) gave no sample",
            "Check its path or filter. What can be passed over only once is given as a function.",
        )

    def items(self, epoch: int, seed: int, part: tuple[int, int] | None, shuffles: bool) -> Iterator[Any]:
        """Return the samples of an epoch, not decoded.

        ``part`` is rank and number of workers if each reads shards of its own; None for all samples.
        """
        rank, workers = part or (0, 1)
        shards = None
        if self._source.shards:
            shards = shard_numbers(self._source.shards, seed, epoch, shuffles)[rank::workers]
        items: Iterable[Any] = self._source.open(epoch, shards)
        if not shuffles or not self.shuffle_buffer:
            return iter(items)
        return shuffled(items, self.shuffle_buffer, seed, epoch, rank, workers)

    def decoded(self, item: Any) -> Any:
        """Return what the source gave as a sample."""
        return item if self._decode is None else self._decode(item)

    def batch_of(self, samples: list[Any]) -> Arrays:
        """Return decoded samples as a batch."""
        return fetch(_Given(self, samples), np.arange(len(samples)))

    def joined(self, samples: list[Any]) -> Arrays:
        """Return samples as a batch, by the user's function or stacked."""
        if self._collate is not None:
            return collated(self._collate, samples, lambda batch: named(batch, self._names))
        return stack([self._columns.arrays(sample) for sample in samples], np.arange(len(samples)))

    def _leave_out(self, sample: Any) -> None:
        """Leave out what holds no numbers, unless the user makes samples or batches."""
        if self._decode is not None or self._collate is not None or not isinstance(sample, dict):
            return
        self._columns.learn(sample, f"the first sample of the stream ({self._source.name})")
        self.notes = self._columns.notes


class _Given:
    """Samples that have been read, as a data set."""

    def __init__(self, of: Stream, samples: list[Any]) -> None:
        self._of, self._samples = of, samples

    def collated(self, indices: NDArray[np.int64]) -> Arrays:
        return self._of.joined([self._samples[index] for index in indices])


def size_words(dataset: Any) -> str:
    """Return the number of samples of a data set; of a stream, "unknown" if it does not say."""
    return samples_words(len(dataset))


def samples_words(size: int) -> str:
    """Return a number of samples as text."""
    return f"{number_words(size)} of samples" if size == UNKNOWN_LENGTH else counted(size, "sample")


def number_words(size: int) -> str:
    """Return the size of data as text."""
    return "an unknown number" if size == UNKNOWN_LENGTH else f"{size:,}"


def is_place_kept(samples: int, before: int, now: int) -> bool:
    """Return whether a place in a stream is the same if its declared length is put right.

    It is if no pass ended by either length, or if one was not declared: passes were or are then counted as
    they end, and the declared one is checked as it is reached.
    """
    return UNKNOWN_LENGTH in (before, now) or samples <= min(before, now)
