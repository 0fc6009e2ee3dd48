"""How gradients are divided into buckets that are reduced one after the other; of both frameworks."""

from collections.abc import Mapping

_MOST = 4
_LEAST_BYTES = 1 << 20


def divide(sizes: Mapping[str, int], are_several: bool) -> list[list[str]]:
    """Return names in buckets of about the same size, in the order in which they are given.

    It depends on nothing but its arguments, so that all workers come to the same.

    Args:
        sizes: bytes, by name, in the order in which a backward pass completes them.
        are_several: whether there may be more than one.
    """
    total = sum(sizes.values())
    count = min(_MOST, max(1, total // _LEAST_BYTES)) if are_several else 1
    buckets: list[list[str]] = []
    done = 0
    for name, size in sizes.items():
        if not buckets or (len(buckets) < count and done >= len(buckets) * total / count):
            buckets.append([])
        buckets[-1].append(name)
        done += size
    return buckets
