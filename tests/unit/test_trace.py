"""The trace of indices where a run goes on: what is done again is cut off first."""

import json

import numpy as np
import pytest

from hvdtrain.data.feed import HostBatch
from hvdtrain.reporting.index_trace import IndexTrace


def batch(step: int) -> HostBatch:
    return HostBatch(step, {}, np.ones((1, 2), np.float32), 2.0, np.asarray([[step, step + 100]]))


def trace_steps(path, first: int, last: int) -> None:
    """Trace steps, counted from 0."""
    with IndexTrace(path, first) as trace:
        for made in trace.watch(map(batch, range(first, last))):
            trace.trained(made.step)


def traced(path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


@pytest.mark.parametrize("goes_on_at", [1, 3, 4])
def test_steps_that_are_done_again_are_in_the_trace_once(tmp_path, goes_on_at):
    path = tmp_path / "indices" / "rank-0000.jsonl"
    trace_steps(path, 0, 4)
    trace_steps(path, goes_on_at, 6)
    assert traced(path) == [1, 2, 3, 4, 5, 6]


def test_a_line_that_was_not_written_out_is_cut_off(tmp_path):
    path = tmp_path / "rank-0000.jsonl"
    trace_steps(path, 0, 2)
    path.write_text(path.read_text() + '{"step": 3, "ind')
    trace_steps(path, 2, 4)
    assert traced(path) == [1, 2, 3, 4]


def test_a_run_that_starts_anew_moves_the_trace_away(tmp_path):
    path = tmp_path / "rank-0000.jsonl"
    trace_steps(path, 0, 3)
    trace_steps(path, 0, 2)
    assert traced(path) == [1, 2]
    assert traced(tmp_path / "rank-0000.jsonl.old") == [1, 2, 3]


def test_a_run_that_goes_on_elsewhere_starts_its_trace_there(tmp_path):
    path = tmp_path / "rank-0000.jsonl"
    trace_steps(path, 7, 9)
    assert traced(path) == [8, 9]
