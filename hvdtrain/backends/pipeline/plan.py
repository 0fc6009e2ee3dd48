"""What the plan says of a split model."""

import math
from collections.abc import Iterable, Sequence
from typing import Any

from hvdtrain.backends.base import Shapes
from hvdtrain.storage.text import counted


def shapes_of_stages(
    fields: Iterable[Any], owners: Sequence[Sequence[int]], shapes: Shapes, stages: int
) -> list[dict[str, tuple[int, ...]]]:
    """Return the shapes of the trainable parameters of each stage, by portable name.

    Args:
        fields: the model's portable arrays.
        owners: the stages that have each of them.
        shapes: of the trainable ones.
        stages: number of stages.
    """
    found: list[dict[str, tuple[int, ...]]] = [{} for _ in range(stages)]
    for field, having in zip(fields, owners, strict=True):
        if field.name in shapes:
            for stage in having:
                found[stage][field.name] = shapes[field.name]
    return found


def describe_stages(firsts: Sequence[int], blocks: int, shapes: Sequence[Shapes]) -> list[str]:
    """Return what each stage has, in words.

    Args:
        firsts: the first block of each stage.
        blocks: number of blocks.
        shapes: of the trainable parameters of each stage.
    """
    ends = [*firsts[1:], blocks]
    lines = []
    for stage, (first, end, of_stage) in enumerate(zip(firsts, ends, shapes, strict=True), 1):
        which = f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"
        count = sum(map(math.prod, of_stage.values()))
        lines.append(f"stage {stage}: {which}, {counted(count, 'parameter')}")
    return lines
