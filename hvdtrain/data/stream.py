"""Streams: samples that can only be read one after the other, and what they are made of."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from pathlib import PurePath
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import numpy as np

from hvdtrain.data.collate import Collate, collated
from hvdtrain.data.datasets import fetch, new_names, stack
from hvdtrain.data.found_files import find_files
from hvdtrain.data.naming import NumericColumns, check_no_batches, has_class, named, type_name
from hvdtrain.data.order import mix, permute
from hvdtrain.data.webdataset import tar_samples
from hvdtrain.errors import DataError
from hvdtrain.storage.text import counted
from hvdtrain.task import Arrays

_SHARDS, _BUFFER = -5, -6  # what random numbers are for
_MOST = 64  # parts or numbers of a value that are looked at, evenly over it
_TOLERANCE = 1e-5  # relative; hosts round floating-point numbers differently

# checksum of text, bytes and integers; a weighted sum of the sizes of the other numbers
Summary = tuple[int, float]


class Trace:
    """What was read so far: other items, or the same in another order, have another summary."""

    def __init__(self) -> None:
        self.summary: Summary = (0, 0.0)
        self._values = 0

    def add(self, item: Any) -> "Trace":
        """Take an item of the source, not decoded; of a large one, parts that are spread over it."""
        if isinstance(item, dict | list | tuple):
            parts = list(item.items()) if isinstance(item, dict) else item
            self._take(b"%d" % len(parts))
            for part in parts[:: len(parts) // _MOST + 1]:
                self.add(part)
            return self
        item = item.encode(errors="replace") if isinstance(item, str) else item
        array = np.frombuffer(item, np.uint8) if isinstance(item, bytes | bytearray) else np.asarray(None)
        if isinstance(item, int | float | np.ndarray | np.generic) or type_name(item).startswith("torch."):
            with suppress(Exception):  # on a device, or with a gradient
                array = np.asarray(item)
        values = array.reshape(-1)[:: array.size // _MOST + 1]
        # of another package, such as an image that is decoded when it is looked at, the type alone
        what = type_name(item) if array.dtype == object else str(array.shape)
        self._take(what.encode() + (values.tobytes() if array.dtype.kind in "biuSU" else b""))
        if array.dtype.kind == "f":
            weights = 1 + (self._values + np.arange(len(values))) * 0.6180339887 % 1
            signed = np.where(values < 0, 2, 1) * np.abs(
                np.nan_to_num(values.astype(np.float64), posinf=0, neginf=0)
            )
            self._values += len(values)
            self._take(b"", float(weights @ signed))
        return self

    def _take(self, data: bytes, size: float = 0.0) -> None:
        self.summary = crc32(data, self.summary[0]), self.summary[1] + size


def are_alike(summaries: Sequence[Summary]) -> bool:
    """Return whether workers read the same items in one order, but for rounding."""
    checksums, sizes = zip(*summaries, strict=True)
    return len(set(checksums)) == 1 and max(sizes) - min(sizes) <= _TOLERANCE * max(sizes)


@dataclass(frozen=True)
class Source:
    """Something that can be passed over again and again."""

    # (epoch, shards) -> the samples of these shards, one after the other, or all of them
    open: Callable[[int, Sequence[int] | None], Iterable[Any]]
    name: str  # what it is, for messages
    shards: int = 0  # how many parts can be read apart; 0 if it cannot be divided
    identity: str = ""  # with the name, a text that is equal if the order of samples is


def source_of(source: Any, shards: Sequence[Any] | None, decodes: bool) -> Source:
    """Return what a user's stream is made of."""
    check_no_batches(source)
    if shards is not None:
        if not callable(source):
            raise DataError(
                f"stream: with shards, source is a function that opens one; found {type_name(source)}",
                "Write hvdtrain.stream(open_shard, shards=paths).",
            )
        return _of_shards(source, list(shards))
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return _of_shards(lambda path: tar_samples(path, decodes), find_files(source, ".tar"))
    if has_class(source, "datasets.IterableDataset"):
        return _of_hugging_face(source)
    if hasattr(source, "__next__"):
        raise DataError(
            f"stream: a {type_name(source)} can be passed over only once",
            "Give a function that returns a new one for each epoch, such as hvdtrain.stream(make_samples).",
        )
    if has_class(source, "tensorflow.DatasetV2"):
        return _undivided(lambda _: source.as_numpy_iterator(), "tf.data")
    if callable(source) and (isinstance(source, type) or not hasattr(source, "__iter__")):
        return _undivided(lambda _: source(), "a function")
    if hasattr(source, "__iter__"):
        return _undivided(lambda epoch: _begun(source, epoch), type_name(source))
    raise DataError(
        f"stream: {type_name(source)} cannot be passed over",
        "Give an iterable, a function that returns one, tars, or a function with shards=[...].",
    )


def _begun(source: Any, epoch: int) -> Iterable[Any]:
    """Return an iterable at the beginning of an epoch, whose number it gets if it has ``set_epoch``."""
    if callable(getattr(source, "set_epoch", None)):
        source.set_epoch(epoch)
    items: Iterable[Any] = iter(source)
    return items


def _undivided(open_all: Callable[[int], Iterable[Any]], name: str) -> Source:
    """Return a source of iterables that cannot be divided, which a function returns for an epoch."""
    last = None

    def open_epoch(epoch: int, shards: Sequence[int] | None) -> Iterable[Any]:
        nonlocal last
        before, last = last, open_all(epoch)
        if last is before and hasattr(last, "__next__"):
            raise DataError(
                f"stream: {name} returned the same {type_name(last)} again, used up after a pass",
                "Make a new one in each call.",
            )
        return last

    return Source(open_epoch, name)


def _of_shards(open_shard: Callable[[Any], Iterable[Any]], shards: Sequence[Any]) -> Source:
    """Return a source of shards, such as paths, that a function opens."""
    if not shards:
        raise DataError("stream: shards is empty", "Check the path or the pattern that names them.")

    def open_some(epoch: int, numbers: Sequence[int] | None) -> Iterator[Any]:
        for number in range(len(shards)) if numbers is None else numbers:
            yield from open_shard(shards[number])

    paths = [str(shard).split("/") for shard in shards]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    common = len(list(takewhile(lambda names: len(set(names)) == 1, folders)))
    names = ["/".join(path[common:]) for path in paths]
    if not all(isinstance(shard, str | PurePath) for shard in shards):
        # of other objects what they hold, but neither folders nor where they lie in memory
        names = [re.sub(r"[^'\"(, ]*/| at 0x[0-9a-f]+", "", repr(shard)) for shard in shards]
    identity = blake2b("\n".join(names).encode(errors="replace"), digest_size=8).hexdigest()
    return Source(open_some, f"{len(shards)} shards", len(shards), identity)


def _of_hugging_face(dataset: Any) -> Source:
    """Return a source of a streamed data set of Hugging Face: its files are its shards."""
    count = int(dataset.num_shards if hasattr(dataset, "num_shards") else dataset.n_shards)

    def open_some(epoch: int, numbers: Sequence[int] | None) -> Iterator[Any]:
        parts = [dataset]
        if count > 1:
            numbers = range(count) if numbers is None else numbers
            parts = [dataset.shard(num_shards=count, index=int(number)) for number in numbers]
        for part in parts:  # each is a new object, whose shuffle depends on the epoch
            yield from _begun(part, epoch)

    return Source(open_some, f"{count} shards", count)


def shuffled(items: Iterable[Any], size: int, *seeds: int) -> Iterator[Any]:
    """Yield items through a buffer of this size, from which one is drawn for each that comes in."""
    buffer: list[Any] = []
    drawn = 0
    for item in items:
        if len(buffer) < size:
            buffer.append(item)
            continue
        place, drawn = mix(_BUFFER, *seeds, drawn) % size, drawn + 1
        chosen, buffer[place] = buffer[place], item
        yield chosen
    while buffer:
        place, drawn = mix(_BUFFER, *seeds, drawn) % len(buffer), drawn + 1
        buffer[place], buffer[-1] = buffer[-1], buffer[place]
        yield buffer.pop()


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
    return Stream(found, new_names(inputs, targets), length, shuffle_buffer, decode, collate)


@dataclass(eq=False)
class Stream:
    """Samples that can only be read one after the other: a data set of which the first has an index."""

    source: Source
    names: dict[str, str]
    length: int | None  # the declared number of samples of an epoch
    shuffle_buffer: int
    decode: Callable[[Any], Any] | None
    collate: Collate | None
    seen: int | None = None  # the number of samples of the last whole pass
    notes: tuple[str, ...] = ()  # to be reported to the user

    def __post_init__(self) -> None:
        self._columns = NumericColumns(self.names)
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
        text = " ".join(f"stream {self.source.name} {self.source.identity} {self.shuffle_buffer}".split())
        return blake2b(text.encode(), digest_size=8).hexdigest()

    def is_dealt(self, workers: int) -> bool:
        """Return whether each of several workers reads shards of its own; otherwise each reads everything."""
        return 1 < workers <= self.source.shards

    def with_collate(self, collate: Collate | None) -> "Stream":
        """Return the stream with a function that makes its batches."""
        if collate is None:
            return self
        found = copy(self)
        found.collate, found._first, found.notes = collate, [], ()
        return found

    def first(self) -> Any:
        """Return the first sample, decoded; it is read once."""
        if not self._first:
            item = self._begin()
            sample = self.decoded(item)
            self._first.append(sample)
            if self.decode is None and self.collate is None and isinstance(sample, dict):
                self._columns.learn(sample, f"the first sample of the stream ({self.source.name})")
                self.notes = self._columns.notes
            if not are_alike([Trace().add(item).summary, Trace().add(self._begin()).summary]):
                self.notes += (_CHANGES,)
        return self._first[0]

    def _begin(self) -> Any:
        """Return what the source gives first."""
        for item in self.source.open(0, None):
            return item
        raise DataError(
            f"the stream ({self.source.name}) gave no sample",
            "Check its path or filter. What can be passed over only once is given as a function.",
        )

    def items(self, epoch: int, seed: int, part: tuple[int, int] | None, shuffles: bool) -> Iterator[Any]:
        """Return the samples of an epoch, not decoded; of a part (rank, workers) its shards alone."""
        rank, workers = part or (0, 1)
        shards = None
        if count := self.source.shards:
            order = np.arange(count)
            order = permute(order, count, mix(seed, _SHARDS), epoch) if shuffles else order
            shards = order[rank::workers].tolist()
        items: Iterable[Any] = self.source.open(epoch, shards)
        if not shuffles or not self.shuffle_buffer:
            return iter(items)
        return shuffled(items, self.shuffle_buffer, seed, epoch, rank, workers)

    def decoded(self, item: Any) -> Any:
        """Return what the source gave as a sample."""
        return item if self.decode is None else self.decode(item)

    def batch_of(self, samples: list[Any]) -> Arrays:
        """Return decoded samples as a batch."""
        return fetch(SimpleNamespace(collated=lambda _: self.joined(samples)), np.arange(len(samples)))

    def joined(self, samples: list[Any]) -> Arrays:
        """Return samples as a batch, by the user's function or stacked."""
        if self.collate is not None:
            return collated(self.collate, samples, lambda batch: named(batch, self.names))
        return stack([self._columns.arrays(sample) for sample in samples], np.arange(len(samples)))


def samples_words(size: int) -> str:
    """Return a number of samples as text."""
    return f"{number_words(size)} of samples" if size == UNKNOWN_LENGTH else counted(size, "sample")


def number_words(size: int) -> str:
    """Return the size of data as text."""
    return "an unknown number" if size == UNKNOWN_LENGTH else f"{size:,}"


def is_place_kept(samples: int, before: int, now: int) -> bool:
    """Return whether a place in a stream is the same if its declared length is put right."""
    return UNKNOWN_LENGTH in (before, now) or samples <= min(before, now)
