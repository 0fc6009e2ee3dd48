"""Recording steps over fakes: when it begins and ends, what stands in its way, and what records."""

import gzip
import json
import os
import time
from types import SimpleNamespace

import pytest
import torch
from support.fakes import FakeBackend, FakeReport, asks, make_loop_session, on_every_rank, one_worker
from support.profiles import DAMAGED, MS, check_trace

from hvdtrain.backends.hooks import Activities, LoopHooks
from hvdtrain.backends.recording import Busy, HorovodTimeline, Operation, Operations, timeline_requested
from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.backends.torch.step_clock import operations_in
from hvdtrain.loop import run
from hvdtrain.session import Session
from hvdtrain.tools.profile.recording import Recording
from hvdtrain.tools.profile.step_profile import StepProfile
from hvdtrain.training_plan import Progress
from hvdtrain.workers.activity import ACTIVITY, READING_DATA, TRAINING


class FakeRecorder:
    """Records one operation."""

    def __init__(self) -> None:
        self.timeline = SimpleNamespace(start=lambda: None, stop=list)

    def start(self) -> None:
        self._begun_ns = time.time_ns()

    def stop(self) -> Operations:
        return Operations(["main"], [Operation(0, "mm", self._begun_ns, time.time_ns() + MS, "operation")])

    def busy(self) -> Busy | None:
        return Busy(time.time(), 0.0)


class Shown(FakeReport):
    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def say(self, text) -> None:
        self.said.append(text)


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
    assert [n for n in report.notes if "profile" in n] == ([] if not note else [report.notes[0]])
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


def recorded_by_two(folders) -> list[Shown]:
    """Let two workers record a step, each with a run directory."""

    def work(workers):
        profile, session = profile_of("1", folders[workers.rank], workers)
        profile.on_workers()
        profile.before_step(1)
        ACTIVITY.enter(READING_DATA, 1)
        ACTIVITY.enter(TRAINING, 1)
        profile.before_step(2)
        return session.services.report

    return on_every_rank(["here", "here"], work)


def test_rank_0_writes_what_all_workers_recorded(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    recorded_by_two(folders)
    check_trace(trace_in(folders[0]), 2)
    assert not any(folders[1].iterdir())


@pytest.mark.parametrize("pack", [lambda _: DAMAGED, lambda _: exec("raise MemoryError")])
def test_a_recording_that_cannot_be_sent_or_read_is_missing(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(Recording, "to_bytes", pack)
    reports = recorded_by_two([tmp_path, tmp_path])
    assert all(isinstance(report, Shown) for report in reports), reports
    check_trace(trace_in(tmp_path), 1)
    assert "profile: the recordings of 1 of 2 workers are missing" in reports[0].notes


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
    with timeline_requested(is_requested):
        assert os.environ.get(name) == seen
    assert os.environ.get(name) == given
    with pytest.raises(RuntimeError, match="the timeline of the whole job there"):
        HorovodTimeline(None).start()
