"""How parameters are divided among workers that each keep a part of the state; of both frameworks.

The parameters of one type stand one after the other in buckets. Of each bucket every worker owns one part,
and all parts of a bucket have the same length, so that a parameter may belong to several workers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from hvdtrain.backends.workers import peer_errors
from hvdtrain.config import Config
from hvdtrain.workers.agreement import Workers

_SEVERAL = 8
LEAST_BYTES = 1 << 20
BUCKET_BYTES = 32 << 20


def divide(sizes: Mapping[str, int], are_several: bool) -> list[list[str]]:
    """Return names in buckets of about 32 MiB, in the order in which they are given, of sizes in bytes.

    Where there are to be several, the first one has 1 MiB, so that it is sent early, and each other one an
    eighth of all, so that the last, for which all wait, is small.
    """
    total = sum(sizes.values())
    count = -(-total // BUCKET_BYTES)
    least = max(LEAST_BYTES, min(total // _SEVERAL, BUCKET_BYTES))
    buckets: list[list[str]] = []
    done = begun = 0  # bytes; those before the last bucket
    for name, size in sizes.items():
        if are_several:
            is_full = done - begun >= (least if len(buckets) > 1 else LEAST_BYTES)
        else:
            is_full = len(buckets) < count and done >= len(buckets) * total / count
        if not buckets or is_full:
            buckets.append([])
            begun = done
        buckets[-1].append(name)
        done += size
    return buckets


ALIGNMENT = 16  # numbers: vector units then compute what a part begins with as they do in a whole parameter
PART_BYTES = 16 << 20


class Segment(NamedTuple):
    """What one worker owns of one parameter."""

    name: str  # the parameter's
    begin: int  # the first of its numbers, in the flattened parameter
    end: int  # the number after its last one
    offset: int  # where its first number stands in the worker's part of the bucket


@dataclass(frozen=True)
class ShardedBucket:
    """Parameters of one type that stand one after the other."""

    begins: Mapping[str, int]  # by the parameter's name, where it begins in the bucket
    part: int  # numbers that each worker owns, padding included
    segments: tuple[tuple[Segment, ...], ...]  # for each worker what it owns, in the order of the bucket

    @property
    def length(self) -> int:
        """Numbers of the bucket, padding included: those of all parts."""
        return self.part * len(self.segments)


def shard(sizes: Mapping[str, int], workers: int, number_bytes: int = 4) -> list[ShardedBucket]:
    """Divide parameters of one type into buckets of at most 16 MiB, and each bucket among the workers."""
    most = PART_BYTES // number_bytes
    buckets: list[dict[str, int]] = []
    length = 0
    for name, size in sizes.items():
        if not buckets or length + size > most:
            buckets.append({})
            length = 0
        buckets[-1][name] = length
        length += _aligned(size)
    return [_divided(begins, sizes, workers) for begins in buckets]


def _divided(begins: Mapping[str, int], sizes: Mapping[str, int], workers: int) -> ShardedBucket:
    length = max(begin + sizes[name] for name, begin in begins.items())
    part = _aligned(-(-length // workers))
    segments = tuple(
        tuple(
            Segment(name, own - begin, end - begin, own - first)
            for name, begin in begins.items()
            if (own := max(begin, first)) < (end := min(begin + sizes[name], first + part))
        )
        for first in (rank * part for rank in range(workers))
    )
    return ShardedBucket(begins, part, segments)


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, eq=False)
class OwnSegment:
    """What this worker owns of one parameter."""

    entry: Any  # the parameter: an ``Entry`` of PyTorch, a ``Field`` of TensorFlow
    tensor: Any  # a vector with its part, which the optimizer updates
    begin: int  # the first of its numbers, in the flattened parameter
    end: int  # the number after its last one
    offset: int  # its offset in the worker's part of the bucket

    def in_part(self, part: Any) -> Any:
        """Return the segment's place in a vector with the worker's part of the bucket."""
        return part[self.offset : self.offset + self.end - self.begin]


@dataclass(frozen=True, eq=False)
class CommonBucket:
    """Parameters of one type that are gathered at once."""

    number: int  # its place among the buckets
    layout: ShardedBucket  # which numbers belong to whom
    entries: tuple[Any, ...]  # the parameters, in the order of the layout
    segments: tuple[OwnSegment, ...]  # what this worker owns


Values = Callable[[OwnSegment], Any]  # returns what this worker has for a segment


class CommonShardedParameters:
    """The trainable parameters of a model, of which every worker updates a part."""

    bucket: ClassVar[type[Any]]
    gather: Any  # collective: sets every parameter from what each worker has for its segments

    def __init__(self, trainable: Sequence[Any], workers: Workers) -> None:
        self.workers = workers
        self.buckets: list[Any] = []
        kinds: dict[tuple[Any, ...], dict[str, int]] = {}
        entries = {entry.path: entry for entry in reversed(trainable)}
        for path, entry in entries.items():
            length, *kind = self._form_of(entry)
            kinds.setdefault(tuple(kind), {})[path] = length
        for (number_bytes, *_), sizes in kinds.items():
            for layout in shard(sizes, workers.size, number_bytes):
                members = tuple(entries[name] for name in layout.begins)
                own = tuple(
                    OwnSegment(entries[s.name], self._vector_of(entries[s.name], s.begin, s.end), *s[1:])
                    for s in layout.segments[workers.rank]
                )
                self.buckets.append(self.bucket(len(self.buckets), layout, members, own))

    @classmethod
    def of(cls, config: Config, trainable: Sequence[Any], workers: Workers) -> Self | None:
        """Return them divided as a config requests; None if each worker updates all of them."""
        return cls(trainable, workers) if config.shard != "none" and workers.size > 1 else None

    @property
    def entries(self) -> list[Any]:
        """The parameters, in the order of the buckets."""
        return [entry for bucket in self.buckets for entry in bucket.entries]

    @property
    def tensors(self) -> list[Any]:
        """The tensors of the parameters."""
        return [entry.tensor for entry in self.entries]

    @property
    def segments(self) -> list[OwnSegment]:
        """What this worker owns, in the order of the buckets."""
        return [segment for bucket in self.buckets for segment in bucket.segments]

    @contextmanager
    def replaced(self, values: Values, name: str) -> Iterator[None]:
        """Collective. Return a context in which the parameters are what each worker has for its segments."""
        own = self._copies()
        with peer_errors():
            self.gather(values, name)
        try:
            yield
        finally:
            self._restore(own)

    def gather_on_root(self, values: Values, name: str) -> Iterator[tuple[Any, Any]]:
        """Collective. Yield each bucket, with what all workers have for it on rank 0; each takes all."""
        for bucket in self.buckets:
            splits = np.zeros(self.workers.size, np.int32)
            splits[0] = bucket.layout.part
            name_of_bucket = f"hvdtrain.{name}.{bucket.number}"
            yield bucket, self._all_to_all(self._part_of(bucket, values), splits, name_of_bucket)

    def scatter_from_root(self, fill: Callable[[Any, Any], None], targets: Values, name: str) -> None:
        """Collective. Give every worker its part of what rank 0 fills in, one bucket after the other."""
        for bucket in self.buckets:
            flat = self._zeros_of(bucket)
            if self.workers.rank == 0:
                fill(bucket, flat)
            flat = self._broadcast(flat, f"hvdtrain.{name}.{bucket.number}")
            begin = self.workers.rank * bucket.layout.part
            for segment in bucket.segments:
                self._set(targets(segment), segment.in_part(flat[begin : begin + bucket.layout.part]))

    # what a framework has of them
    _form_of: Any  # how many numbers a parameter has, the bytes of one, and what else buckets share
    _vector_of: Any  # a vector with some numbers of a parameter
    _copies: Any  # copies of all parameters
    _restore: Any  # sets the parameters to these
    _part_of: Any  # this worker's part of a bucket, of values for its segments
    _zeros_of: Any  # a vector for a bucket
    _all_to_all: Any  # collective; what it returns is on the host
    _broadcast: Any  # collective: returns rank 0's vector
    _set: Any  # sets a vector to values


class CommonShardedAverage:
    """The moving average of this worker's part of the weights, as a class before the framework's average."""

    _native: Any  # returns a segment's vector as the framework has it
    _copy: Any  # returns a copy of a vector

    def __init__(self, model: Any, decay: float | None, shards: Any) -> None:
        super().__init__(model, None)  # type: ignore[call-arg]
        self.decay, self.is_kept, self._shards = decay or 0.0, decay is not None, shards
        segments = shards.segments if self.is_kept else []
        self._weights = [self._native(segment.tensor) for segment in segments]
        self._averages = list(map(self._copy, self._weights))
        self._of_segment = dict(zip(map(id, segments), self._averages, strict=True))

    def to_broadcast(self) -> list[Any]:
        """Return nothing: every worker has averages of its own."""
        return []

    def follow_broadcast(self) -> None:
        """Start from the weights that were broadcast."""
        self.restart()  # type: ignore[attr-defined]

    def of(self, segment: OwnSegment) -> Any:
        """Return the average of a segment."""
        return self._of_segment[id(segment)]

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Collective. Return a context in which the model's weights are the averages of all workers."""
        with self._shards.replaced(self.of, "ema") if self.is_kept else nullcontext():
            yield
