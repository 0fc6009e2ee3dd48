"""Where a sequence of blocks is cut into stages."""

from collections.abc import Sequence
from itertools import accumulate

from hvdtrain.errors import ConfigError, TaskError


def cut(costs: Sequence[float], stages: int, last_costs: Sequence[float] | None = None) -> list[int]:
    """Return the first block of each stage, so that the largest cost of a stage is as small as possible.

    Of several such divisions, the one is chosen whose stages before the last cost most: they are the first in
    the order of their first blocks from behind.

    Args:
        costs: of each block, such as the seconds that it takes.
        stages: number of stages; each has at least one block.
        last_costs: of each block if it is in the last stage; None if they are the same.

    Raises:
        TaskError: If there are fewer blocks than stages.
    """
    count = len(costs)
    check_enough(count, stages)
    sums = [0.0, *accumulate(costs)]
    last_sums = [0.0, *accumulate(costs if last_costs is None else last_costs)]
    # by the number of stages: the largest cost of a stage of the first blocks, and where the last one begins
    best = [[sums[end] for end in range(count + 1)]]
    begins = [[0] * (count + 1)]
    for used in range(1, stages):
        of_stage = last_sums if used == stages - 1 else sums
        row, begin_row = [float("inf")] * (count + 1), [0] * (count + 1)
        for end in range(used + 1, count + 1):
            for begin in range(used, end):
                largest = max(best[used - 1][begin], of_stage[end] - of_stage[begin])
                if largest <= row[end]:
                    row[end], begin_row[end] = largest, begin
        best.append(row)
        begins.append(begin_row)
    firsts, end = [], count
    for used in range(stages - 1, -1, -1):
        begin = begins[used][end] if used else 0
        firsts.append(begin)
        end = begin
    return firsts[::-1]


def given_cuts(cuts: Sequence[int], blocks: int, stages: int) -> list[int]:
    """Return the first block of each stage as a config gives it.

    Args:
        cuts: the first block of each stage but the first.
        blocks: number of blocks.
        stages: number of stages.

    Raises:
        ConfigError: If they do not divide the blocks into stages of at least one block.
        TaskError: If there are fewer blocks than stages.
    """
    check_enough(blocks, stages)
    firsts = [0, *cuts]
    ends = [*cuts, blocks]
    if len(firsts) != stages or any(first >= end for first, end in zip(firsts, ends, strict=True)):
        raise ConfigError(
            f"stage_cuts {list(cuts)} does not divide {blocks} blocks into {stages} stages",
            f"Give {stages - 1} increasing numbers from 1 to {blocks - 1}: the first block of each stage but "
            "the first, blocks being counted from 0.",
            everywhere=True,
        )
    return firsts


def check_enough(blocks: int, stages: int) -> None:
    """Check that each stage can have a block.

    Raises:
        TaskError: If there are too few.
    """
    if blocks < stages:
        found = "one block" if blocks == 1 else f"{blocks} blocks"
        raise TaskError(
            f"the model has {found}, which cannot be divided into {stages} stages",
            f"Use --stages {blocks} or fewer, or let the task give more and smaller blocks."
            if blocks > 1
            else "Leave --stages out, or let the task give more and smaller blocks.",
            everywhere=True,
        )
