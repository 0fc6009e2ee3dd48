"""Recording steps over fakes: when it begins and ends, what stands in its way, and what records."""

import gzip
import json
import os
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from support.fakes import FakeBackend, FakeReport, asks, make_loop_session, on_every_rank, one_worker
from support.profiles import DAMAGED, MS, check_trace

from hvdtrain.backends.hooks import Activities, LoopHooks
from hvdtrain.backends.recording import Busy, Operation, Operations
from hvdtrain.backends.step_metrics import ControlFlags
from hvdtrain.backends.torch.step_clock import operations_in
from hvdtrain.config import Config
from hvdtrain.jobs.train import run_job
from hvdtrain.loop import run
from hvdtrain.session import Session
from hvdtrain.tools.profile.recording import Recording
from hvdtrain.tools.profile.step_profile import StepProfile
from hvdtrain.training_plan import Progress
from hvdtrain.workers.activity import ACTIVITY, READING_DATA, TRAINING


class FakeRecorder:
    """Records one operation; any of its methods may fail."""

    timeline_events: ClassVar[list[dict]] = []

    def __init__(self, fails: str = "") -> None:
        self.timeline = SimpleNamespace(start=lambda: None, stop=lambda: self.timeline_events)
        self._fails = fails

    def start(self) -> None:
        if self._fails == "start":
            raise RuntimeError("another profiler runs")
        self._begun_ns = time.time_ns()

    def stop(self) -> Operations:
        if self._fails == "stop":
            raise OSError("no space left")
        return Operations(["main"], [Operation(0, "mm", self._begun_ns, time.time_ns() + MS, "operation")])

    def busy(self) -> Busy | None:
        if self._fails == "busy":
            raise RuntimeError("no clock")
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


def profile_of(window, folder, workers=None, fails="", backend=None) -> tuple[StepProfile, Session]:
    """Return a profile over fakes, and its session, of which it is the only hook."""
    session = make_loop_session(folder, backend or FakeBackend(workers or one_worker()), profile=window)
    session.services.report = Shown()
    session.backend.recorder = lambda: FakeRecorder(fails)
    profile = StepProfile(session)
    session.services.hooks = LoopHooks(profile, Activities(lambda: None))
    return profile, session


def train_step(number: int) -> None:
    ACTIVITY.enter(READING_DATA, number)
    ACTIVITY.enter(TRAINING, number)


def profiled(window, tmp_path, done: int = 0, fails: str = "", lost_lease: str = "") -> Shown:
    """Train five steps of the loop, of which a profile records some; return what was shown."""
    _, session = profile_of(window, tmp_path, fails=fails)
    session.state.progress, session.services.lost_lease = Progress(done, 4 * done), lambda: lost_lease
    run(session)
    return session.services.report


def trace_in(folder) -> dict:
    return json.loads(gzip.decompress((folder / "profile" / "trace.json.gz").read_bytes()))


def steps_in(folder) -> list[int]:
    return json.loads((folder / "profile" / "costs.json").read_text())["steps"]


def test_the_loop_records_the_steps_that_are_asked_for(tmp_path):
    report = profiled("2-3", tmp_path)
    check_trace(trace_in(tmp_path), 1)
    assert steps_in(tmp_path) == [2, 3]
    assert report.said[0].startswith("profile of steps 2 to 3 with 1 worker, ")
    assert str(tmp_path / "profile" / "trace.json.gz") in report.said[0]
    assert report.notes == []
    assert sorted(path.name for path in (tmp_path / "profile").iterdir()) == ["costs.json", "trace.json.gz"]


@pytest.mark.parametrize(
    ("window", "done", "recorded", "note"),
    [
        ("4-9", 0, [4, 5], ""),
        ("1", 0, [1], ""),
        ("2-4", 2, [3, 4], "profile: recording begins with step 3: training resumed there"),
        ("2-3", 3, None, "nothing was recorded of steps 2 to 3: training resumed at step 4"),
        ("6-9", 0, None, "nothing was recorded of steps 6 to 9: training ended at step 5"),
        ("6", 5, None, "nothing was recorded of step 6: training ended at step 5"),
    ],
)
def test_windows_that_training_does_not_cover(tmp_path, window, done, recorded, note):
    report = profiled(window, tmp_path, done)
    assert [n for n in report.notes if "profile" in n] == ([] if not note else [report.notes[0]])
    assert note in "".join(report.notes)
    assert (steps_in(tmp_path) if recorded else None) == recorded
    assert recorded or not (tmp_path / "profile").exists()


def test_a_trace_that_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / "profile").write_text("not a folder")
    report = profiled("2-3", tmp_path)
    assert report.steps == [1, 2, 3, 4, 5]
    assert "profile: it cannot be written to" in report.notes[0]
    assert "the largest shares" in report.said[0]


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


def recorded_by_two(folders, ends=True) -> list[Shown]:
    """Let two workers record a step, each with a run directory."""

    def work(workers):
        profile, session = profile_of("1", folders[workers.rank], workers)
        profile.on_workers()
        profile.before_step(1)
        train_step(1)
        if ends:
            profile.before_step(2)
        else:
            profile.__exit__(RuntimeError, None, None)
        return session.services.report

    return on_every_rank(["here", "here"], work)


def test_rank_0_writes_what_all_workers_recorded(tmp_path):
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()
    reports = recorded_by_two(folders)
    check_trace(trace_in(folders[0]), 2)
    assert sorted(path.name for path in (folders[0] / "profile").iterdir()) == ["costs.json", "trace.json.gz"]
    assert not any(folders[1].iterdir())
    assert [len(report.said) for report in reports] == [1, 0]


def test_after_a_failure_rank_0_writes_its_own(tmp_path):
    reports = recorded_by_two([tmp_path, tmp_path], ends=False)
    check_trace(trace_in(tmp_path), 1)
    assert "profile: the recordings of 1 of 2 workers are missing" in reports[0].notes


def out_of_memory(recording):
    raise MemoryError


def damaged(recording):
    return DAMAGED


@pytest.mark.parametrize("pack", [out_of_memory, damaged])
def test_a_recording_that_cannot_be_sent_or_read_is_missing(tmp_path, monkeypatch, pack):
    monkeypatch.setattr(Recording, "to_bytes", pack)
    reports = recorded_by_two([tmp_path, tmp_path])
    assert all(isinstance(report, Shown) for report in reports), reports
    check_trace(trace_in(tmp_path), 1)
    assert "profile: the recordings of 1 of 2 workers are missing" in reports[0].notes


TIMELINE = "HOROVOD_TIMELINE"


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


@pytest.mark.parametrize(("window", "seen"), [("2-3", "DYNAMIC"), (None, None)])
def test_training_starts_horovod_with_a_timeline_if_steps_are_to_be_recorded(monkeypatch, window, seen):
    found = []

    def start(*job, **options):
        found.append(os.environ.get(TIMELINE))
        raise RuntimeError("enough")

    monkeypatch.delenv(TIMELINE, raising=False)
    job = SimpleNamespace(config=Config(framework="torch", profile=window))
    monkeypatch.setattr("hvdtrain.jobs.train.prepare", lambda layers, task_class: job)
    monkeypatch.setattr("hvdtrain.jobs.train.started", start)
    with pytest.raises(RuntimeError, match="enough"):
        run_job([])
    assert found == [seen]
    assert TIMELINE not in os.environ
