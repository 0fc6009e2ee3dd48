"""Which of the tensors that the passes of a micro-batch make are the largest; of both frameworks."""

from collections import Counter
from collections.abc import Iterable, Sequence

_SHOWN = 3


def largest_tensors(made: Iterable[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Return the largest kinds of tensors, the largest first: what they are and how many, and bytes of each.

    Args:
        made: of each tensor, what it is, such as "addmm (256, 4096) float32", and its bytes.
    """
    counts = Counter(made)
    kinds = sorted(counts, key=lambda kind: (-kind[1], -counts[kind], kind[0]))[:_SHOWN]
    return tuple((f"{counts[kind]} x {kind[0]}" if counts[kind] > 1 else kind[0], kind[1]) for kind in kinds)
