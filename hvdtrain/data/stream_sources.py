"""What streams are made of: iterables of other packages, shards, tars without an index."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from pathlib import PurePath
from typing import Any

import numpy as np

from hvdtrain.data.order import mix, permute
from hvdtrain.data.shard_files import find_files
from hvdtrain.data.unsupported import check_no_batches, has_class, type_name
from hvdtrain.data.webdataset import tar_samples
from hvdtrain.errors import DataError

_SHARDS, _BUFFER = -5, -6  # what random numbers are for


@dataclass(frozen=True)
class Source:
    """Something that can be passed over again and again."""

    # (epoch, shards) -> the samples of these shards, one after the other, or all of them
    open: Callable[[int, Sequence[int] | None], Iterable[Any]]
    name: str  # what it is, for messages
    shards: int = 0  # how many parts can be read apart; 0 if it cannot be divided
    identity: str = ""  # with the name, a text that is equal if the order of samples is


def _undivided(open_all: Callable[[int], Iterable[Any]], name: str) -> Source:
    """Return a source of iterables that cannot be divided, which a function returns for an epoch."""
    last: list[Any] = [None]

    def open_epoch(epoch: int, shards: Sequence[int] | None) -> Iterable[Any]:
        found = open_all(epoch)
        if found is last[0]:
            raise DataError(
                f"stream: {name} returned the same {type_name(found)} again, used up after a pass",
                "Make a new one in each call.",
            )
        last[0] = found if hasattr(found, "__next__") else None
        return found

    return Source(open_epoch, name)


def _of_shards(open_shard: Callable[[Any], Iterable[Any]], shards: Sequence[Any]) -> Source:
    """Return a source of shards, such as paths, that a function opens."""
    if not shards:
        raise DataError("stream: shards is empty", "Check the path or the pattern that names them.")

    def open_some(epoch: int, numbers: Sequence[int] | None) -> Iterator[Any]:
        for number in range(len(shards)) if numbers is None else numbers:
            yield from open_shard(shards[number])

    return Source(open_some, f"{len(shards)} shards", len(shards), names_digest(shards))


def _of_hugging_face(dataset: Any) -> Source:
    """Return a source of a streamed data set of Hugging Face: its files are its shards."""
    count = int(dataset.num_shards if hasattr(dataset, "num_shards") else dataset.n_shards)

    def open_some(epoch: int, numbers: Sequence[int] | None) -> Iterator[Any]:
        parts = [dataset]
        if count > 1:
            numbers = range(count) if numbers is None else numbers
            parts = [dataset.shard(num_shards=count, index=int(number)) for number in numbers]
        for part in parts:  # each is a new object
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)  # a shuffle of its own depends on it
            yield from part

    return Source(open_some, f"{count} shards", count)


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


def names_digest(shards: Sequence[Any]) -> str:
    """Return a digest of what shards are called, in their order.

    Of paths, folders that all have in common do not count: they may lie elsewhere on another host.
    """
    are_paths = all(isinstance(shard, str | PurePath) for shard in shards)
    paths = [str(shard).split("/") for shard in shards]
    folders = zip(*(path[:-1] for path in paths), strict=False)
    common = len(list(takewhile(lambda names: len(set(names)) == 1, folders)))
    # of other objects what they hold, but neither folders nor where they lie in memory
    others = [re.sub(r"[^'\"(, ]*/| at 0x[0-9a-f]+", "", repr(shard)) for shard in shards]
    names = ["/".join(path[common:]) for path in paths] if are_paths else others
    return blake2b("\n".join(names).encode(errors="replace"), digest_size=8).hexdigest()


def shard_numbers(count: int, seed: int, epoch: int, shuffles: bool) -> list[int]:
    """Return the shards of an epoch in their order."""
    numbers = np.arange(count)
    order = permute(numbers, count, mix(seed, _SHARDS), epoch) if shuffles else numbers
    return [int(number) for number in order]


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
