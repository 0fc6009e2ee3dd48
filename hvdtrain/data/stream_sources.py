"""What streams are made of: iterables of other packages, shards, tars without an index."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b
from pathlib import PurePath
from typing import Any, Protocol, cast

import numpy as np

from hvdtrain.data.order import mix, permute
from hvdtrain.data.shard_files import find_files
from hvdtrain.data.unsupported import check_no_batches, has_class, type_name
from hvdtrain.data.webdataset import tar_samples
from hvdtrain.errors import DataError

_SHARDS, _BUFFER = -5, -6  # what random numbers are for


class Source(Protocol):
    """Something that can be passed over again and again.

    Attributes:
        shards: how many parts can be read apart; 0 if it cannot be divided.
        name: what it is, for messages.
        identity: a text that is equal if the order of samples is.
    """

    shards: int
    name: str
    identity: str

    def open(self, epoch: int, shards: Sequence[int] | None) -> Iterable[Any]:
        """Return the samples of an epoch: those of some shards, one after the other, or all of them."""
        ...


class IterableSource:
    """Iterables that cannot be divided, which a function returns for an epoch."""

    shards = 0

    def __init__(self, open_all: Callable[[int], Iterable[Any]], name: str) -> None:
        self._open_all = open_all
        self._last: Any = None
        self.name = self.identity = name

    def open(self, epoch: int, shards: Sequence[int] | None) -> Iterable[Any]:
        """Return the samples of an epoch, not what was returned before: that was passed over already."""
        found = self._open_all(epoch)
        if found is self._last:
            raise DataError(
                f"stream: {self.name} returned the same {type_name(found)} again, used up after a pass",
                "Make a new one in each call.",
            )
        self._last = found if hasattr(found, "__next__") else None
        return found


class ShardSource:
    """Shards, such as paths, that a function opens."""

    def __init__(self, open_shard: Callable[[Any], Iterable[Any]], shards: Sequence[Any]) -> None:
        self._open_shard, self._shards = open_shard, list(shards)
        self.shards = len(self._shards)
        self.name = f"{self.shards} shards"
        self.identity = f"{self.name} {names_digest(self._shards)}"
        if not self._shards:
            raise DataError("stream: shards is empty", "Check the path or the pattern that names them.")

    def open(self, epoch: int, shards: Sequence[int] | None) -> Iterator[Any]:
        """Yield the samples of shards, one shard after the other."""
        for number in range(self.shards) if shards is None else shards:
            yield from self._open_shard(self._shards[number])


class HuggingFaceSource:
    """A streamed data set of Hugging Face: its files are its shards."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self.shards = int(dataset.num_shards if hasattr(dataset, "num_shards") else dataset.n_shards)
        self.name = self.identity = f"{self.shards} shards"

    def open(self, epoch: int, shards: Sequence[int] | None) -> Iterator[Any]:
        """Yield the samples of shards, one shard after the other."""
        if self.shards == 1:
            yield from self._at(self._dataset, epoch)
            return
        for number in range(self.shards) if shards is None else shards:
            yield from self._at(self._dataset.shard(num_shards=self.shards, index=int(number)), epoch)

    def _at(self, dataset: Any, epoch: int) -> Iterable[Any]:
        """Return a data set or a shard of it, which is a new object, as it is in an epoch."""
        if hasattr(dataset, "set_epoch"):
            dataset.set_epoch(epoch)  # a shuffle of its own depends on it
        return cast(Iterable[Any], dataset)


def source_of(source: Any, shards: Sequence[Any] | None, decodes: bool) -> Source:
    """Return what a user's stream is made of.

    Raises:
        DataError: If it cannot be passed over more than once, or is no stream.
    """
    check_no_batches(source)
    if shards is not None:
        if not callable(source):
            raise DataError(
                f"stream: with shards, source is a function that opens one; found {type_name(source)}",
                "Write hvdtrain.stream(open_shard, shards=paths).",
            )
        return ShardSource(source, shards)
    if isinstance(source, str) or hasattr(source, "__fspath__"):
        return ShardSource(lambda path: tar_samples(path, decodes), find_files(source, ".tar"))
    if has_class(source, "datasets.IterableDataset"):
        return HuggingFaceSource(source)
    if hasattr(source, "__next__"):
        raise DataError(
            f"stream: a {type_name(source)} can be passed over only once",
            "Give a function that returns a new one for each epoch, such as hvdtrain.stream(make_samples).",
        )
    if has_class(source, "tensorflow.DatasetV2"):
        return IterableSource(lambda _: source.as_numpy_iterator(), "tf.data")
    if callable(source) and (isinstance(source, type) or not hasattr(source, "__iter__")):
        return IterableSource(lambda _: source(), "a function")
    if hasattr(source, "__iter__"):
        return IterableSource(lambda epoch: _begun(source, epoch), type_name(source))
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
    paths = [str(shard).split("/") for shard in shards if isinstance(shard, str | PurePath)]
    common = 0
    while paths and all(len(path) > common + 1 and path[common] == paths[0][common] for path in paths):
        common += 1
    names = [
        "/".join(str(shard).split("/")[common:]) if isinstance(shard, str | PurePath) else _plain(shard)
        for shard in shards
    ]
    return blake2b("\n".join(names).encode(errors="replace"), digest_size=8).hexdigest()


def _plain(value: Any) -> str:
    """Return numbers, text and containers of them as a text, and of other objects the type."""
    if isinstance(value, str | PurePath):
        return str(value).rpartition("/")[2]
    if isinstance(value, list | tuple):
        return f"({','.join(map(_plain, value))})"
    if isinstance(value, dict):
        return f"({','.join(f'{_plain(key)}:{_plain(one)}' for key, one in value.items())})"
    is_plain = value is None or isinstance(value, bool | int | float | bytes | range | slice | np.generic)
    return repr(value) if is_plain else type_name(value)


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
