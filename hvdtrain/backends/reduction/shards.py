"""How parameters are divided among workers that each keep a part of the state; of both frameworks.

The parameters of one type stand one after the other in buckets. Of each bucket every worker owns one part,
and all parts of a bucket have the same length, so that a parameter may belong to several workers.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from hvdtrain.config.values import compression_of

_SEVERAL = 8
LEAST_BYTES = 1 << 20
BUCKET_BYTES = 32 << 20


def divide(sizes: Mapping[str, int], are_several: bool) -> list[list[str]]:
    """Return names in buckets of about the same size, in the order in which they are given.

    A bucket has about 32 MiB at most, unless it is one larger gradient: whoever reduces it may allocate as
    much once more. The result depends on nothing but the arguments, so that all workers come to the same.

    Args:
        sizes: bytes, by name, in the order in which a backward pass completes them.
        are_several: whether small ones are divided, too: the first bucket has 1 MiB, so that it is sent
            early, and each other one an eighth of all, so that the last, for which all wait, is small.
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


@dataclass(frozen=True)
class Segment:
    """What one worker owns of one parameter."""

    name: str  # the parameter's
    begin: int  # the first of its numbers, in the flattened parameter
    end: int  # the number after its last one
    offset: int  # where its first number stands in the worker's part of the bucket

    @property
    def length(self) -> int:
        """Number of its numbers."""
        return self.end - self.begin


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
    """Divide parameters of one type into buckets, and each bucket among the workers.

    A bucket has at most 16 MiB, unless it is one larger parameter. Parameters and parts begin at multiples of
    ``ALIGNMENT``; what stands between is padding. The result depends on nothing but the arguments, so that
    all workers come to the same.
    """
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
            Segment(
                name, max(begin, first) - begin, min(end, first + part) - begin, max(begin, first) - first
            )
            for name, begin in begins.items()
            if max(begin, first) < min(end := begin + sizes[name], first + part)
        )
        for first in (rank * part for rank in range(workers))
    )
    return ShardedBucket(begins, part, segments)


def _aligned(numbers: int) -> int:
    return -(-numbers // ALIGNMENT) * ALIGNMENT


def type_of_parts(compression: str, workers: int, scaled: bool) -> tuple[str, int]:
    """Return the type in which parts of gradients travel, and what they are multiplied by before that.

    fp16 would lose digits of parts of a mean over all workers, unless a loss scale has multiplied them.
    """
    kind = compression_of(compression).parts_as
    return kind, workers if kind == "float16" and not scaled else 1
