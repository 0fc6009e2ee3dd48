"""Recording steps over fakes: when it begins and ends, what records, the trace, its costs and the clocks."""

import gzip
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from support.fakes import FakeBackend, FakeReport, asks, make_loop_session, on_every_rank, one_worker
from support.profiles import DAMAGED, EPOCH_NS, MS, check_trace, horovod_events, recording

from hvdtrain.backends import recording as records
from hvdtrain.backends.hooks import Activities, LoopHooks
from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.backends.torch.step_clock import operations_in
from hvdtrain.loop import run
from hvdtrain.schedule import StepWindow
from hvdtrain.session import Session
from hvdtrain.tools.profile.costs import build_trace, find_costs, self_seconds
from hvdtrain.tools.profile.recording import ClockOffset, Recording, measure_offset
from hvdtrain.tools.profile.step_profile import StepProfile
from hvdtrain.training_plan import Progress
from hvdtrain.workers.activity import ACTIVITY, READING_DATA, TRAINING


class FakeRecorder:
    """Records one operation."""

    def __init__(self) -> None:
        self.timeline = SimpleNamespace(start=lambda: None, stop=list)

    def start(self) -> None:
        self._begun_ns = time.time_ns()

    def stop(self) -> records.Operations:
        span = records.Operation(0, "mm", self._begun_ns, time.time_ns() + MS, "operation")
        return records.Operations(["main"], [span])

    def busy(self) -> records.Busy | None:
        return records.Busy(time.time(), 0.0)


class Shown(FakeReport):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.say = self.said.append


@pytest.fixture(autouse=True)
def nobody_listens_afterwards():
    yield
    assert ACTIVITY.listener is None


def profile_of(window, folder, workers=None) -> tuple[StepProfile, Session]:
    """Return a profile over fakes, and its session, of which it is the only hook."""
    session = make_loop_session(folder, FakeBackend(workers or one_worker()), profile=window)
    session.services.report = Shown()
    session.backend.recorder = FakeRecorder
    profile = StepProfile(session)
    session.services.hooks = LoopHooks(profile, Activities(lambda: None))
    return profile, session


def profiled(window, tmp_path, done: int = 0) -> Shown:
    """Train five steps of the loop, of which a profile records some; return what was shown."""
    _, session = profile_of(window, tmp_path)
    session.state.progress = Progress(done, 4 * done)
    run(session)
    return session.services.report


def trace_in(folder) -> dict:
    return json.loads(gzip.decompress((folder / "profile" / "trace.json.gz").read_bytes()))


def test_a_trace_that_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / "profile").write_text("not a folder")
    report = profiled("2-3", tmp_path)
    assert report.steps == [1, 2, 3, 4, 5]
    assert "profile: it cannot be written to" in report.notes[0]
    assert report.said[0].startswith("profile of steps 2 to 3 with 1 worker, ")


@pytest.mark.parametrize(
    ("window", "done", "recorded", "note"),
    [
        ("4-9", 0, [4, 5], ""),
        ("2-4", 2, [3, 4], "profile: recording begins with step 3: training resumed there"),
        ("2-3", 3, None, "nothing was recorded of steps 2 to 3: training resumed at step 4"),
        ("6-9", 0, None, "nothing was recorded of steps 6 to 9: training ended at step 5"),
    ],
)
def test_windows_that_training_does_not_cover(tmp_path, window, done, recorded, note):
    report = profiled(window, tmp_path, done)
    assert [n for n in report.notes if "profile" in n] == ([report.notes[0]] if note else [])
    assert note in "".join(report.notes)
    if recorded is None:
        assert not (tmp_path / "profile").exists()
        return
    check_trace(trace_in(tmp_path), 1)
    assert json.loads((tmp_path / "profile" / "costs.json").read_text())["steps"] == recorded
    assert str(tmp_path / "profile" / "trace.json.gz") in report.said[0]


@pytest.mark.parametrize("hosts", [["h1"], ["h1", "h2"]])
@pytest.mark.parametrize(("stops", "order"), [(True, ["save", "profile"]), (False, ["profile"])])
def test_a_job_that_is_asked_to_stop_saves_before_it_writes_its_profile(tmp_path, hosts, stops, order):
    """The launcher may leave it less time than a trace takes."""

    def work(workers):
        ended = []
        profile, session = profile_of("1-9", tmp_path, workers)
        session.services.saver.finish = lambda: ended.append("save")
        profile._write = lambda recordings: ended.append("profile")
        run(session, asks({2: ControlFlags(stop=True)} if stops else {}, session.backend))
        return ended

    assert on_every_rank(hosts, work) == [order] * len(hosts)


@pytest.mark.parametrize(
    ("pack", "sent"), [(None, 2), (lambda _: DAMAGED, 1), (lambda _: exec("raise MemoryError"), 1)]
)
def test_rank_0_writes_what_all_workers_recorded_and_could_send(tmp_path, monkeypatch, pack, sent):
    folders = [tmp_path / "a", tmp_path / "b"]
    if pack is not None:
        monkeypatch.setattr(Recording, "to_bytes", pack)

    def work(workers):
        folders[workers.rank].mkdir()
        profile, session = profile_of("1", folders[workers.rank], workers)
        profile.on_workers()
        profile.before_step(1)
        ACTIVITY.enter(READING_DATA, 1)
        ACTIVITY.enter(TRAINING, 1)
        profile.before_step(2)
        return session.services.report

    reports = on_every_rank(["here", "here"], work)
    assert all(isinstance(report, Shown) for report in reports), reports
    check_trace(trace_in(folders[0]), sent)
    assert not any(folders[1].iterdir())
    assert ("profile: the recordings of 1 of 2 workers are missing" in reports[0].notes) is (sent == 1)


def test_what_pytorch_records_becomes_spans_by_the_clock_of_the_host():
    profiler = torch.profiler.profile()
    begin_ns = time.time_ns()
    profiler.start()
    with torch.profiler.record_function("mine"):
        torch.ones(2, 2) @ torch.ones(2, 2)
    profiler.stop()
    found = operations_in(profiler.profiler.kineto_results.events())
    kinds = {span.name: span.kind for span in found.spans}
    assert (kinds["aten::mm"], kinds["mine"]) == ("operation", "runtime")
    assert len(found.threads) == 1
    assert all(begin_ns - 1e8 < span.begin_ns <= span.end_ns < time.time_ns() + 1e8 for span in found.spans)
    assert [span.begin_ns for span in found.spans] == sorted(span.begin_ns for span in found.spans)


@pytest.mark.parametrize(
    ("given", "is_requested", "seen"), [(None, True, "DYNAMIC"), (None, False, None), ("own", True, "own")]
)
def test_horovod_prepares_for_a_timeline_if_steps_are_to_be_recorded(monkeypatch, given, is_requested, seen):
    name = "HOROVOD_TIMELINE"
    monkeypatch.setenv(name, given) if given else monkeypatch.delenv(name, raising=False)
    with records.timeline_requested(is_requested):
        assert os.environ.get(name) == seen
    assert os.environ.get(name) == given
    with pytest.raises(RuntimeError, match="the timeline of the whole job there"):
        records.HorovodTimeline(None).start()


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
    for one in (pair := [recording(0, 4), slow]):
        one.marks = []
    costs = find_costs(pair)
    assert costs["ready_last"] == {}
    assert any("and waiting for other workers" in cost["what"] for cost in costs["costs"])


def test_operations_that_run_at_once_share_the_time_and_on_a_device_its_kernels_count():
    one = recording(0, 4)
    one.operations.threads.append("other")
    for phase in one.phases[1::2]:
        span = records.Operation(1, "long", phase.begin_ns, phase.end_ns, "operation")
        one.operations.spans.append(span)
    found = shares([one])
    assert found["long"] == pytest.approx(0.9 * 18 / 22, abs=1e-5)
    assert sum(found.values()) == pytest.approx(1)
    one.operations.spans.append(
        records.Operation(0, "gemm", EPOCH_NS + MS, EPOCH_NS + 2 * MS, records.KERNEL)
    )
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
