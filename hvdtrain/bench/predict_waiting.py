"""How long a step waits for the slowest of many workers, from the spread of measured steps."""

import math
from collections.abc import Sequence
from statistics import NormalDist, fmean, median, pstdev

import numpy as np

from hvdtrain.bench.spread import Spread

_BLOM = 0.375  # Blom 1958: the expected largest of N normal numbers lies near the quantile of this offset
_MANY = 1000  # numbers whose harmonic number is its expansion to ten digits


def normal_excess(workers: int) -> float:
    """Return how many standard deviations the largest of so many normal numbers exceeds the mean by."""
    return NormalDist().inv_cdf((workers - _BLOM) / (workers + 1 - 2 * _BLOM))


def exponential_excess(workers: int) -> float:
    """Return the same of numbers with an exponential tail: the harmonic number, minus one."""
    if workers > _MANY:
        return math.log(workers) + np.euler_gamma + 1 / (2 * workers) - 1
    return sum(1 / k for k in range(2, workers + 1))


def drawn_excess(deviations: Sequence[float], workers: int) -> float:
    """Return the expected largest of so many draws from measured deviations, minus their mean.

    Args:
        deviations: measured steps minus their mean.
        workers: how many are drawn, each from all deviations alike.
    """
    ordered = np.sort(np.asarray(deviations, np.float64))
    shares = np.linspace(0.0, 1.0, len(ordered) + 1) ** workers
    return float(np.dot(ordered, np.diff(shares)) - ordered.mean())


def wait_for_slowest(deviations: Sequence[float], workers: int, steps: int = 1) -> Spread:
    """Return how much longer than the mean the slowest of so many workers takes, for one step.

    Three formulas differ in the tail that they give to steps: a normal one, the measured one, which ends with
    the longest step that was seen, and an exponential one. The middle one is the median, the others are the
    range.

    Args:
        deviations: measured steps minus their mean, of workers that do not wait for one another.
        workers: number of workers.
        steps: how many steps the workers train before they wait for one another.
    """
    if workers < 2 or len(deviations) < 2:
        return Spread(0.0, 0.0, 0.0)
    sigma = pstdev(deviations)
    found = [
        sigma * normal_excess(workers),
        drawn_excess(deviations, workers),
        sigma * exponential_excess(workers),
    ]
    each = 1 / math.sqrt(steps)  # independent steps: their sum spreads by the root of their number
    return Spread(median(found) * each, max(0.0, min(found)) * each, max(found) * each)


def deviations_of(blocks: Sequence[Sequence[Sequence[float]]]) -> list[float]:
    """Return by how much steps differ from the mean of their worker and block.

    Args:
        blocks: for each block, by rank, how long each step took.
    """
    return [
        seconds - mean
        for block in blocks
        for of_rank in block
        for mean in (fmean(of_rank),)
        for seconds in of_rank
    ]


def lag_of(blocks: Sequence[Sequence[Sequence[float]]]) -> Spread:
    """Return how much longer than the mean the steps of the worker take that is slowest for good.

    Args:
        blocks: for each block, by rank, how long each step took.
    """
    means = [[fmean(of_rank) for of_rank in block] for block in blocks]
    lasting = [fmean(of_rank) for of_rank in zip(*means, strict=True)]
    slowest = lasting.index(max(lasting))
    return Spread.of([max(0.0, of_block[slowest] - fmean(of_block)) for of_block in means])
