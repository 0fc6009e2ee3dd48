"""The trace of a recording, its costs and the clocks, from small recordings."""

import json
import time

import pytest
from support.fakes import on_every_rank
from support.profiles import DAMAGED, EPOCH_NS, MS, check_trace, horovod_events, recording

from hvdtrain.backends.recording import KERNEL, Operation
from hvdtrain.schedule import StepWindow
from hvdtrain.tools.profile.costs import build_trace, find_costs, self_seconds
from hvdtrain.tools.profile.recording import ClockOffset, Recording, measure_offset

TWO = (recording(0, 4), recording(1, 6, offset_ms=250))


def shares(recordings) -> dict[str, float]:
    return {cost["what"]: cost["share"] for cost in find_costs(recordings)["costs"]}


def test_a_window_of_steps():
    assert StepWindow.parse("20-24") == StepWindow.parse(" 20 - 24 ") == StepWindow(20, 24)
    assert StepWindow.parse(20) == StepWindow.parse("20") == StepWindow(20, 20)
    with pytest.raises(ValueError, match="such as 20-24"):
        StepWindow.parse(1224.5)


def test_the_trace_is_valid_and_has_all_ranks():
    first, second = recording(0, 4), TWO[1]
    first.timeline = horovod_events()
    trace = build_trace([first, second])
    steps = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "in training step"]
    assert [(e["pid"], e["ts"]) for e in steps] == [(1, 1000), (1, 11000), (2, 1000), (2, 11000)], "one clock"
    check_trace(json.loads(json.dumps(trace)), 2)
    horovod = [event for event in trace["traceEvents"] if event["pid"] == 3]
    assert {(e["name"], e["ts"], e["dur"]) for e in horovod if e["ph"] == "X"} == {
        ("NEGOTIATE_ALLREDUCE", 3000, 2000),
        ("ALLREDUCE", 5000, 2500),
        ("MPI_ALLREDUCE", 5500, 1500),
    }
    first.timeline[0]["args"]["start_time_since_epoch_in_micros"] += 3600 * 1_000_000
    shown = build_trace([first])["traceEvents"]
    assert {event["pid"] for event in shown if event["ph"] == "X"} == {1}, "what is outside of the steps"


def test_costs_are_shares_of_all_workers_time():
    found = shares(TWO)
    assert found == {
        # 9 ms in a step less 3 of waiting and reducing on the mean, less 2 of operations
        "the rest of the steps: Python, and what starts operations": 0.4,
        "all-reduce, as far as it is waited for": 0.2,
        "waiting for rank 1, which had its gradients last in 2 of 2 steps": 0.1,
        "waiting for data": 0.1,
        "outer": 0.1,
        "inner": 0.1,
    }
    assert sum(found.values()) == pytest.approx(1)
    costs = find_costs(TWO)
    assert costs["ready_last"] == {"1": 2}
    assert (costs["step_ms"], costs["clock_uncertainty_ms"]) == (10, pytest.approx(0.1))
    slow = recording(1, 6)
    slow.phases[0] = slow.phases[0]._replace(end_ns=slow.phases[0].end_ns - MS // 2)
    found = shares([recording(0, 6), slow])
    assert found["the recording itself, which notes what begins and ends (most on rank 1)"] == 0.0125
    assert sum(found.values()) == pytest.approx(1)


def test_without_marks_waiting_is_in_the_rest():
    pair = [recording(0, 4), recording(1, 6)]
    for one in pair:
        one.marks = []
    costs = find_costs(pair)
    assert costs["ready_last"] == {}
    assert any("and waiting for other workers" in cost["what"] for cost in costs["costs"])


def test_operations_that_run_at_once_share_the_time():
    one = recording(0, 4)
    one.operations.threads.append("other")
    one.operations.spans += [
        Operation(1, "long", phase.begin_ns, phase.end_ns, "operation") for phase in one.phases[1::2]
    ]
    found = shares([one])
    assert found["long"] == pytest.approx(0.9 * 18 / 22, abs=1e-5)
    assert sum(found.values()) == pytest.approx(1)


def test_on_a_device_its_kernels_count():
    one = recording(0, 4)
    one.operations.spans.append(Operation(0, "gemm", EPOCH_NS + MS, EPOCH_NS + 2 * MS, KERNEL))
    assert self_seconds(one) == {"gemm": 0.001}


def test_a_recording_travels():
    sent = TWO[1].to_bytes()
    assert Recording.from_bytes(sent) == TWO[1]
    for content in (sent[:-9], b"x", DAMAGED, b""):
        with pytest.raises(ValueError, match="holds no recording"):
            Recording.from_bytes(content)


@pytest.mark.parametrize("hosts", [["a", "b"], ["a", "a", "b", "c"]])
def test_offsets_of_clocks_are_found_within_a_millisecond(hosts):
    offsets = {"a": 0, "b": 3_600_000_000_000, "c": -250_000_000}

    def measured(workers):
        offset = offsets[workers.host]
        return measure_offset(workers, workers.host, lambda: time.time_ns() + offset)

    for host, found in zip(hosts, on_every_rank(hosts, measured), strict=True):
        assert abs(found.offset_ns - offsets[host]) <= found.uncertainty_ns <= 1_000_000
        assert host != "a" or found == (0, 0)
    assert ClockOffset(1000, 10).joined(ClockOffset(3000, 20)) == (2000, 1020), "a clock that drifts"
