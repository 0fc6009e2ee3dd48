"""In which order a stage computes the forward and backward passes of the micro-batches of a step."""

from collections.abc import Iterator
from typing import Literal

Pass = tuple[Literal["forward", "backward"], int]


def one_forward_one_backward(stage: int, stages: int, micro_batches: int) -> Iterator[Pass]:
    """Yield the passes of one stage: "forward" or "backward", and the micro-batch.

    A stage computes as many forward passes ahead as there are stages behind it, and from then on a backward
    pass after each forward pass. So it keeps the inputs of at most ``stages - stage`` micro-batches, however
    many there are.

    Source: D. Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training", 2019; with
    the flush at the end of each step of "Memory-Efficient Pipeline-Parallel DNN Training", 2021.

    Args:
        stage: the stage, from 0.
        stages: number of stages.
        micro_batches: number of micro-batches of a step.
    """
    ahead = min(stages - stage - 1, micro_batches)
    for place in range(ahead):
        yield "forward", place
    for place in range(micro_batches):
        if place + ahead < micro_batches:
            yield "forward", place + ahead
        yield "backward", place


def bubble(stages: int, micro_batches: int) -> float:
    """Return the part of a step in which a stage waits, if all stages take equally long.

    A step takes as long as ``micro_batches + stages - 1`` passes of one stage, of which each stage computes
    ``micro_batches``.
    """
    return (stages - 1) / (micro_batches + stages - 1)
