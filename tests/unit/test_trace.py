"""The trace of indices where a run goes on: what is done again is cut off first."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.backends.objective.stateful_metrics import Samples
from hvdtrain.reporting.records import IndexTrace, cut_traces, read_indices


def batch(step: int, *indices: int) -> SimpleNamespace:
    """Return what a trace uses of a batch on the device, which ends in padding."""
    weights = np.asarray([[*(1.0 for _ in indices), 0.0]])
    return SimpleNamespace(step=step, samples=Samples(np.asarray([[*indices, 0]]), weights, 0))


def trace_of(run_dir, rank: int, first: int, generation: int = 0, **options) -> IndexTrace:
    return IndexTrace(lambda: (run_dir, rank, first, generation), **options)


def trace_steps(run_dir, first: int, last: int) -> Path:
    """Trace steps, counted from 0; return the file."""
    with trace_of(run_dir, 0, first) as trace:
        for step in range(first, last):
            trace.on_batch(batch(step, step, step + 100))
    return run_dir / "indices" / "rank-0000.jsonl"


def traced(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("goes_on_at", [1, 3, 4])
def test_steps_that_are_done_again_are_in_the_trace_once(tmp_path, goes_on_at):
    trace_steps(tmp_path, 0, 4)
    path = trace_steps(tmp_path, goes_on_at, 6)
    assert traced(path) == [1, 2, 3, 4, 5, 6]
    assert path.read_text().splitlines()[-1] == '{"step": 6, "indices": [5, 105]}'  # without padding


def test_a_run_that_starts_anew_moves_the_trace_away(tmp_path):
    trace_steps(tmp_path, 0, 3)
    path = trace_steps(tmp_path, 0, 2)
    assert traced(path) == [1, 2]
    assert traced(path.with_name("rank-0000.jsonl.old")) == [1, 2, 3]


def trace_world(run_dir, generation: int, ranks: int, first: int, last: int) -> None:
    """Trace the steps of a world, counted from 0; rank r has the indices r of each."""
    for rank in range(ranks):
        with trace_of(run_dir, rank, first, generation) as trace:
            for step in range(first, last):
                trace.on_batch(batch(step, 10 * step + rank))


def test_the_indices_of_all_ranks_of_all_worlds_are_read_by_step(tmp_path):
    trace_world(tmp_path, 1, ranks=3, first=0, last=4)
    trace_world(tmp_path, 2, ranks=1, first=4, last=5)
    trace_world(tmp_path, 3, ranks=2, first=5, last=6)
    assert read_indices(tmp_path) == {
        **{step + 1: [10 * step, 10 * step + 1, 10 * step + 2] for step in range(4)},
        5: [40],
        6: [50, 51],
    }


@pytest.mark.parametrize("is_cut", [True, False])
def test_a_step_that_a_broken_world_began_counts_once(tmp_path, is_cut):
    """Without the cut, such as of a file that rank 0 does not see, the later world tells."""
    trace_world(tmp_path, 1, ranks=3, first=0, last=4)
    if is_cut:
        cut_traces(tmp_path, 3)
        assert list(read_indices(tmp_path)) == [1, 2, 3]
    trace_world(tmp_path, 2, ranks=1, first=3, last=5)
    assert {step: len(indices) for step, indices in read_indices(tmp_path).items()} == {
        1: 3, 2: 3, 3: 3, 4: 1, 5: 1
    }  # fmt: skip
