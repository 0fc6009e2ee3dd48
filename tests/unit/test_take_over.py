"""Another rank 0: what it finds, cuts, appends and writes from then on, on real files."""

import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fakes import FakeBackend, FakeWorkers, make_loop_session, on_every_rank, open_directory
from support.states import contents, make_record, make_state
from support.watching import Watched, records, run_context

from hvdtrain.callbacks import Callback
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.saver import Saver
from hvdtrain.config import Config
from hvdtrain.errors import EnvironmentFault
from hvdtrain.jobs.elastic.world_state import hand_over_run, report_change, take_over_run
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.reporting.records import RecentRecords, cut_tail, line_of
from hvdtrain.reporting.report import Report
from hvdtrain.training_plan import Progress
from hvdtrain.workers.world import Change, World

JOB = "job-1"


def world(generation: int, rank: int = 0, size: int = 2, **fields) -> World:
    return World(
        generation=generation, rank=rank, size=size, local_rank=rank, local_size=size, cross_rank=0,
        cross_size=1, host="here", store=("127.0.0.1", 1), one_host=True, salt="", **fields,
    )  # fmt: skip


def step_info(step: int) -> StepInfo:
    return StepInfo(step, (step - 1) * 8, step * 8, step * 0.8, 2, 0.1, 0.0)


class Worker:
    """A worker of an elastic job: its session and what it needs to be rank 0."""

    made: ClassVar[list["Worker"]] = []

    def __init__(self, run_dir: Path, rank: int, callbacks=(), **fields) -> None:
        self.made.append(self)
        workers = FakeWorkers(rank, ["here"] * 2, threading.Barrier(1), [b""])
        self.session = make_loop_session(run_dir, FakeBackend(workers), train_size=100, **fields)
        self.session.config = self.session.config.model_copy(update={"run_dir": str(run_dir)})
        lock, context = lock_of(), run_context(run_dir, rank=rank)
        model = SimpleNamespace(parameter_shapes={})
        self.run = SimpleNamespace(callbacks=callbacks, lock=lock, model=model, store=None)
        self.run.context = lambda run_dir: replace(context, rank=0, run_dir=run_dir)
        own = [callback for callback in callbacks if callback.every_rank]
        self.session.services.report = Report(context, own) if own else Report()
        if rank == 0:
            single = FakeWorkers(0, ["here"], threading.Barrier(1), [b""])
            self.session.services.report, _ = open_directory(
                self.session.config, single, None, callbacks, context=context, lock=lock
            )
        self.session.services.report.on_start(25, 0)

    def stand_at(self, step: int, evaluated: int | None = None) -> None:
        self.session.state.progress = Progress(step, step * 8)
        self.session.state.last_eval_step = evaluated

    def log(self, *steps: int) -> None:
        for step in steps:
            self.session.services.report.on_window(step_info(step), {"loss": 1.0 / step}, 100.0)

    def evaluate(self, step: int) -> None:
        self.session.services.report.on_evaluation(step_info(step), {"loss": 0.5}, 100.0)

    def take_over(self, generation: int = 2) -> list[str]:
        return take_over_run(self.run, self.session, world(generation))


@pytest.fixture
def run_dir(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield tmp_path / "run"
    while Worker.made:
        worker = Worker.made.pop()
        worker.session.services.report.close()
        worker.run.lock.release()


@pytest.fixture
def pair(run_dir):
    """Rank 0 and rank 1 of a job. Where rank 0 is killed, the system releases its lock."""
    return Worker(run_dir, 0), Worker(run_dir, 1)


def logged(run_dir: Path) -> list[tuple[str, int]]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [(line["phase"], line["step"]) for line in lines]


def of_step(step: int) -> list[dict]:
    """Give what is written of a step: every third is evaluated, and then a callback of rank 0 logs."""
    phases = ["train", "eval", "callback"] if step % 3 == 0 else ["train"]
    return [{"phase": phase, "step": step} for phase in phases]


@settings(max_examples=80)
@given(data=st.data())
def test_whenever_rank_0_is_lost_each_line_is_there_once(tmp_path_factory, data):
    """It may be a step ahead, may have evaluated or not, and its host may have lost what it wrote last."""
    path = tmp_path_factory.mktemp("lost") / "metrics.jsonl"
    step = data.draw(st.sampled_from([1, 3, 6, 39, 40]))
    is_evaluated = step % 3 == 0 and data.draw(st.booleans())
    written = [record for k in range(1, step + 2) for record in of_step(k)]
    ahead = data.draw(st.integers(-6, 3))  # lines that rank 0 wrote and this worker does not know, or lost
    done = {"train", "eval", "callback"} if is_evaluated else {"train"}  # of the last step
    known = [r for r in written if r["step"] < step or (r["step"] == step and r["phase"] in done)]
    lines = [line_of(record) for record in written[: max(0, len(known) + ahead)]]
    torn = data.draw(st.binary(max_size=20).filter(lambda text: b"\n" not in text))
    path.write_bytes(b"".join(lines) + torn)

    recent = RecentRecords(record for record in known if record["phase"] != "callback")
    tail = cut_tail(path, step, redone=() if is_evaluated else ("eval",))
    again = recent.lacking_in(tail, step)
    if step % 3 == 0 and not is_evaluated:
        again += of_step(step)[1:]
    again += [record for k in range(step + 1, 61) for record in of_step(k)]
    with path.open("ab") as file:
        file.writelines(map(line_of, again))

    found = [(line["phase"], line["step"]) for line in map(json.loads, path.read_text().splitlines())]
    assert len(set(found)) == len(found)
    assert {("train", k) for k in range(1, 61)} | {("eval", k) for k in range(3, 61, 3)} <= set(found)
    trained = [k for phase, k in found if phase == "train"]
    assert trained == sorted(trained)


@pytest.mark.parametrize("evaluated", [None, 4])
def test_an_evaluation_that_is_done_again_is_in_the_log_once(run_dir, pair, evaluated):
    old, new = pair
    for worker in pair:
        worker.log(1, 2, 3, 4)
    old.evaluate(4)
    if evaluated:
        new.evaluate(4)
    new.stand_at(4, evaluated)
    old.run.lock.release()
    new.take_over()
    if not evaluated:
        new.evaluate(4)
    assert logged(run_dir)[3:] == [("train", 4), ("eval", 4)]


def test_tensorboard_has_each_step_once(run_dir, pair, monkeypatch):
    old, new = pair
    old.log(1, 2, 4)  # what rank 0 wrote of step 3 was lost with its host
    old.evaluate(4)
    new.log(1, 2, 3, 4)
    new.stand_at(4)
    old.run.lock.release()
    monkeypatch.setattr("time.time", lambda: 1_000_000_000.0)  # the new rank 0's clock is behind
    new.take_over()
    new.evaluate(4)
    new.log(5)
    new.session.services.report.close()
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(run_dir)).Reload()  # without TensorFlow
    for tag, steps in (("train/loss", [1, 2, 3, 4, 5]), ("eval/loss", [4])):
        assert [event.step for event in found.Scalars(tag)] == steps


def test_checkpoints_of_later_steps_are_set_aside_and_the_newest_is_known(run_dir):
    old, new = Worker(run_dir, 0), Worker(run_dir, 1, keep_best="loss", eval_every=1)
    for step in (2, 3, 5):
        made = make_record(step).model_copy(update={"metrics": {"loss": float(step)}})
        storage.write(run_dir / "checkpoints", make_state(), made)
    (run_dir / "checkpoints" / "step-00000003" / "model.safetensors").chmod(0)  # nothing is hashed
    new.stand_at(4)
    old.run.lock.release()
    (note,) = new.take_over()
    assert "step-00000005 is of a later step; set aside as set-aside-step-00000005" in note
    assert new.session.services.saver.newest == run_dir / "checkpoints" / "step-00000003"
    best = new.session.services.saver._best_of(storage.checkpoints_in(run_dir / "checkpoints"))
    assert best == run_dir / "checkpoints" / "step-00000002"


class Told(Callback):
    """A callback that notes what it is called with."""

    def __init__(self, every_rank: bool) -> None:
        self.every_rank, self.told = every_rank, []

    def on_start(self, context) -> None:
        self.told.append(f"start {context.rank}")

    def on_window(self, step, values) -> None:
        self.told.append(step.step)


def test_callbacks_start_once_and_those_of_rank_0_when_their_worker_is_rank_0(run_dir):
    alone, of_every_rank = Told(False), Told(True)
    old, new = Worker(run_dir, 0), Worker(run_dir, 1, [of_every_rank, alone])
    new.log(1)
    new.stand_at(1)
    old.run.lock.release()
    new.take_over()
    new.log(2)
    folder = new.session.services.report.folder
    hand_over_run(new.run, new.session, world(3, rank=1))
    assert [type(one) for one in (new.session.services.report, new.session.services.saver)] == [Report, Saver]
    assert folder.check() is None  # a save that is under way does not end there
    new.log(3)
    new.stand_at(3)
    new.take_over(generation=4)
    new.log(4)
    assert of_every_rank.told == ["start 1", 1, 2, 3, 4]
    assert alone.told == ["start 0", 2, 4]
    assert logged(run_dir) == [("train", step) for step in (1, 2, 3, 4)]


def test_a_rank_0_that_stays_signs_the_lock_and_cuts_all_traces(run_dir):
    worker = Worker(run_dir, 0, trace_indices=True)
    (run_dir / "indices").mkdir()
    for rank in (0, 3):
        text = "".join(json.dumps({"step": step, "indices": [step]}) + "\n" for step in (1, 2, 3))
        (run_dir / "indices" / f"rank-{rank:04d}.jsonl").write_text(text)
    worker.stand_at(2)
    report = worker.session.services.report
    worker.take_over(generation=5)
    assert worker.session.services.report is report
    assert json.loads((run_dir / LOCK_FILE).read_text())["generation"] == 5
    for path in (run_dir / "indices").iterdir():
        assert len(path.read_text().splitlines()) == 2


def test_a_directory_that_is_not_seen_is_made_anew_and_it_is_said(run_dir, tmp_path, pair):
    for worker in pair:
        worker.log(1, 2)
    _, new = pair
    new.session.services.run_dir = elsewhere = tmp_path / "elsewhere"
    (elsewhere / "indices").mkdir(parents=True)  # this worker's own trace
    new.stand_at(2)
    note, *_ = new.take_over()
    assert note.startswith(f"here cannot see the run directory {elsewhere} of the earlier rank 0; it is made")
    assert logged(elsewhere) == [("train", 1), ("train", 2)]
    assert (elsewhere / "config.yaml").is_file()


def test_a_directory_of_another_run_is_not_touched(run_dir):
    new = Worker(run_dir, 1)
    run_dir.mkdir()
    (run_dir / "metrics.jsonl").write_text("of another run\n")
    (run_dir / LOCK_FILE).write_text('{"pid": 1, "host": "h", "since": "", "job": "job-2", "generation": 1}')
    new.stand_at(2)
    with pytest.raises(EnvironmentFault, match="is not the run directory of this job"):
        new.take_over()
    assert (run_dir / "metrics.jsonl").read_text() == "of another run\n"


HOLDER = """
import sys, time
from pathlib import Path
from hvdtrain.jobs.run_directory.lock import RunLock
lock = RunLock()
lock.job, lock.generation = sys.argv[2], 1
lock.acquire(Path(sys.argv[1]))
print("locked", flush=True)
for _ in sys.stdin:
    print(lock.lost(), flush=True)
"""


@pytest.fixture
def frozen(run_dir):
    """A rank 0 that is given up, and keeps its lock; a line tells it to go on."""
    run_dir.mkdir()
    command = [sys.executable, "-c", HOLDER, str(run_dir), JOB]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        process.kill()


def test_the_lock_of_a_rank_0_that_was_given_up_is_no_hindrance_and_tells_it(run_dir, frozen):
    new = Worker(run_dir, 1)
    new.stand_at(0)
    (note,) = new.take_over()
    lock = f"keeps the lock of {run_dir}: process {frozen.pid}"
    assert note.startswith(f"a worker that is no longer in the job {lock}")
    assert new.run.lock.lost() == ""
    frozen.stdin.write("go on\n")
    frozen.stdin.flush()
    assert frozen.stdout.readline().startswith(f"the run directory was taken over: process {os.getpid()} on ")


def lock_of(generation: int = 1) -> RunLock:
    lock = RunLock()
    lock.job, lock.generation = JOB, generation
    return lock


def test_a_worker_that_was_given_up_does_not_lock_again(run_dir):
    run_dir.mkdir()
    first, late = lock_of(3), lock_of(2)
    first.acquire(run_dir)
    first.release()
    with pytest.raises(EnvironmentFault, match="was taken over: process"):
        late.acquire(run_dir)


def test_a_worker_without_a_lease_writes_nothing(run_dir):
    worker, lost = Worker(run_dir, 1), []
    Worker(run_dir, 0).run.lock.release()
    worker.session.services.lost_lease = lambda: lost[0] if lost else ""
    worker.stand_at(1)
    worker.take_over()
    worker.log(1)
    before = contents(run_dir)
    lost.append("the driver was not heard for 20 s")
    worker.log(2, 3)
    worker.session.services.report.write_summary(None)
    worker.session.backend.workers = FakeWorkers(0, ["here"], threading.Barrier(1), [b""])
    worker.session.services.saver.save(worker.session.backend, make_record(3))
    worker.session.services.saver.finish()
    assert "the driver was not heard for 20 s" in worker.session.services.saver.failures[0]
    assert contents(run_dir) == before
    lost.clear()  # it was a pause
    worker.log(4)
    worker.session.services.report.close()
    assert logged(run_dir) == [("train", step) for step in (1, 2, 3, 4)]


def test_hosts_that_do_not_see_the_directory_are_named(run_dir, tmp_path):
    def opened(workers):
        lock = lock_of()
        if workers.rank:  # its host has another disk
            lock.is_of_job = lambda path: workers.rank == 1
        fields = {"framework": "torch", "epochs": 1, "run_dir": str(run_dir)}
        report, _ = open_directory(Config(**fields), workers, lock=lock)
        report.close()
        return lock.note

    notes = on_every_rank(["alpha", "alpha", "beta"], opened)
    assert notes[0].startswith(f"beta cannot see the run directory {run_dir}: if rank 0 is lost")


def test_a_change_of_the_workers_is_a_line_a_record_and_a_sum(tmp_path):
    left = "rank 2 on h2: killed (SIGKILL)"
    workers = FakeWorkers(0, ["here"] * 3, threading.Barrier(1), [b""])
    session = make_loop_session(tmp_path, FakeBackend(workers), train_size=100, epochs=10, batch_size=1)
    session.state.progress = Progress(100, 300)
    workers.size = 2
    watched, silent = Watched(tmp_path), Report()
    watched.report.on_start(334, 0)
    for report in (watched.report, silent):
        session.services.report = report
        report_change(session, world(2, change=Change(left=(left,), why="w9 left")), 0.81234)
    watched.report.close()
    expected = {
        "phase": "event", "step": 100, "samples": 300, "epoch": 3.0, "event": "changed", "left": [left],
        "joined": [], "cause": "w9 left", "generation": 2, "pause_seconds": 0.812, "workers": 2,
    }  # fmt: skip
    for record in (*records(tmp_path), *silent.recent):
        assert {**record, "seconds": 0} == {**expected, "seconds": 0}
    assert watched.lines == [f"2 workers from step 101 on; left: {left}; 0.8 s without training"]
    assert (session.state.changes, session.state.paused_seconds) == (2, pytest.approx(1.625, abs=1e-3))
