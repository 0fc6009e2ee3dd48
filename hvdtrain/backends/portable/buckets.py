"""How gradients are divided into buckets that are reduced one after the other; of both frameworks."""

from collections.abc import Mapping

_SEVERAL = 4
_LEAST_BYTES = 1 << 20
BUCKET_BYTES = 32 << 20


def divide(sizes: Mapping[str, int], are_several: bool) -> list[list[str]]:
    """Return names in buckets of about the same size, in the order in which they are given.

    A bucket has about 32 MiB at most, unless it is one larger gradient: whoever reduces it may allocate as
    much once more. The result depends on nothing but the arguments, so that all workers come to the same.

    Args:
        sizes: bytes, by name, in the order in which a backward pass completes them.
        are_several: whether small ones are divided, too, so that the first can be reduced early.
    """
    total = sum(sizes.values())
    count = min(_SEVERAL, max(1, total // _LEAST_BYTES)) if are_several else 1
    count = max(count, -(-total // BUCKET_BYTES))
    buckets: list[list[str]] = []
    done = 0
    for name, size in sizes.items():
        if not buckets or (len(buckets) < count and done >= len(buckets) * total / count):
            buckets.append([])
        buckets[-1].append(name)
        done += size
    return buckets
