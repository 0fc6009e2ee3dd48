"""Where models are cut, in which order their stages compute, and what they send one another."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.backends.pipeline.pipeline import (
    Layout,
    bubble,
    check_enough,
    cut,
    given_cuts,
    one_forward_one_backward,
)
from hvdtrain.errors import ConfigError, TaskError


def largest(sizes, firsts):
    ends = [*firsts[1:], len(sizes)]
    return max(sum(sizes[first:end]) for first, end in zip(firsts, ends, strict=True))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
def test_the_largest_stage_is_as_small_as_any_division_makes_it(seed, stages):
    random = np.random.RandomState(seed)
    sizes = random.randint(0, 99, random.randint(stages, 8)).tolist()
    firsts = cut(sizes, stages)
    assert firsts[0] == 0
    assert len(set(firsts)) == stages
    every = [[0, *rest] for rest in itertools.combinations(range(1, len(sizes)), stages - 1)]
    assert largest(sizes, firsts) == min(largest(sizes, one) for one in every)


def test_fewer_blocks_than_stages_are_refused():
    with pytest.raises(TaskError, match="the model has 2 blocks, which cannot be divided into 3 stages"):
        check_enough(2, 3)
    with pytest.raises(TaskError, match="the model has 1 block,"):
        check_enough(1, 2)


@pytest.mark.parametrize("cuts", [[0], [5], [3, 2], [1, 1], [], [1, 2, 3]])
def test_given_cuts_must_fit(cuts):
    with pytest.raises(ConfigError, match="does not divide 5 blocks into 3 stages"):
        given_cuts(cuts, 5, 3)
    assert given_cuts([1, 4], 5, 3) == [0, 1, 4]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 1), (2, 8), (3, 4), (5, 2)])
def test_a_pipeline_ends_and_waits_as_its_formula_says(stages, micro_batches):
    """Every pass takes a unit of time and begins when what it needs is there."""
    left = {stage: list(one_forward_one_backward(stage, stages, micro_batches)) for stage in range(stages)}
    done, units = set(), 0
    while any(left.values()):
        begun = []
        for stage, passes in left.items():
            if not passes:
                continue
            kind, place = passes[0]
            if kind == "forward":
                needed = (stage - 1, "forward", place) if stage else None
            else:
                needed = (stage + 1, "backward", place) if stage + 1 < stages else None
            if needed is None or needed in done:
                begun.append((stage, *passes.pop(0)))
        assert begun, "the stages wait for one another"
        done |= set(begun)
        units += 1
    assert units == 2 * (micro_batches + stages - 1)
    assert 1 - 2 * micro_batches / units == pytest.approx(bubble(stages, micro_batches))


def test_places_of_workers():
    workers = SimpleNamespace(rank=4, size=6)
    layout = Layout.of(workers, 3)
    assert (layout.replicas, layout.replica, layout.stage) == (2, 1, 1)
    assert not layout.is_first_stage
    assert not layout.is_last_stage
    assert layout.describe() == "stage 2 of 3 of replica 1"
    with pytest.raises(ConfigError, match="the job has 6 workers"):
        Layout.of(workers, 4)
