"""What the plan says of a split model."""

from collections.abc import Sequence

_MEBIBYTE = 1 << 20


def describe_stages(firsts: Sequence[int], blocks: int, sizes: Sequence[int]) -> list[str]:
    """Return what each stage has, in words.

    Args:
        firsts: the first block of each stage.
        blocks: number of blocks.
        sizes: bytes of the parameters of each stage.
    """
    ends = [*firsts[1:], blocks]
    lines = []
    for stage, (first, end, size) in enumerate(zip(firsts, ends, sizes, strict=True), 1):
        which = f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"
        lines.append(f"stage {stage}: {which}, {size / _MEBIBYTE:,.1f} MiB of parameters")
    return lines
