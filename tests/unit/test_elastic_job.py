"""Elastic jobs as a whole, over a driver and workers that are threads: workers are lost, join and leave."""

import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from support.fake_worlds import ElasticNumpyBackend, ElasticWorkers, FakeDriver, FakeMembership
from support.numpy_backend import NumpyDigits, install

from hvdtrain.checkpoints import storage
from hvdtrain.config import Layer
from hvdtrain.elastic.watch.liveness import Watching
from hvdtrain.errors import EnvironmentFault, PeerLostError, Stopped, WorkerFailure
from hvdtrain.jobs.elastic.job import train_in_worlds
from hvdtrain.jobs.failures import Signals
from hvdtrain.jobs.opening.setup import opened
from hvdtrain.jobs.opening.start import prepare
from hvdtrain.jobs.outcome import end_together
from hvdtrain.jobs.run_directory.lock import RunLock


class _Killed(BaseException):
    """Ends the thread of a worker that was killed, when the test is over."""


class Job:
    """An elastic job whose workers train the digits in this process."""

    def __init__(self, folder: Path, **fields) -> None:
        self.run_dir = folder / "run"
        given = {"framework": "numpy", "steps": 10, "global_batch_size": 64, "run_dir": str(self.run_dir)}
        given |= {"log_every": 2, "eval_every": 4, "save_every": 4, **fields}
        self.job = prepare([Layer("test", given)], NumpyDigits)
        self.driver = FakeDriver()
        self.outcomes: dict[str, object] = {}
        self.memberships: dict[str, FakeMembership] = {}
        self.calls: dict[str, list[str]] = {}
        self.loses_saves = self.keeps_history = False
        self.is_over = threading.Event()
        self._threads: dict[str, threading.Thread] = {}

    def run(self, *names: str, before=lambda *place: None) -> None:
        """Train with these workers until all that are not killed have ended."""
        self.driver.expect(*names)
        for name in names:
            self.start(name, before)
        while left := [n for n, t in self._threads.items() if t.is_alive() and n not in self.outcomes]:
            self._threads[left[0]].join(0.02)

    def start(self, name: str, before=lambda *place: None, is_joining: bool = False) -> None:
        """Start a worker; ``before`` is called before each call of its backend, with that call's number."""
        self._threads[name] = threading.Thread(target=self._work, args=(name, before, is_joining))
        self._threads[name].start()

    def _work(self, name, before, is_joining) -> None:
        membership = self.memberships[name] = FakeMembership(self.driver, name, is_joining)
        calls = self.calls.setdefault(name, [])

        def called(call: str) -> None:
            if membership.world is None:
                return
            calls.append(call)
            before(name, call, calls.count(call))

        signals = Signals()
        signals.membership = membership
        try:
            workers = ElasticWorkers(membership)
            with RunLock() as lock:
                run = opened(self.job, ElasticNumpyBackend(workers, called), ())
                run = replace(run, lock=lock, keeps_history=self.keeps_history)
                outcome = train_in_worlds(run, membership, signals, Watching())
        except BaseException as error:
            outcome = error
        self.outcomes.setdefault(name, outcome)

    def kill(self, name: str) -> None:
        """End the calling thread as SIGKILL ends a process: nothing that it would do comes after."""
        if not self.loses_saves:  # a thread that writes would go on, which no process does
            for thread in threading.enumerate():
                if thread.name == "save":
                    thread.join()
        self.outcomes[name] = "killed"
        self.driver.lose(name)
        self.is_over.wait()
        raise _Killed

    def end(self) -> None:
        self.is_over.set()
        for thread in self._threads.values():
            thread.join(60)

    def saved(self) -> list[int]:
        return sorted(int(path.name[5:]) for path in (self.run_dir / "checkpoints").glob("step-*"))


@pytest.fixture
def job_in(tmp_path, monkeypatch):
    install(monkeypatch)
    for name in ("HOROVOD_CONTROLLER", "HOROVOD_CPU_OPERATIONS", "UCX_DEBUG_SIGNO"):
        monkeypatch.setenv(name, "gloo")
    jobs = []

    def make(**fields) -> Job:
        jobs.append(Job(tmp_path, **fields))
        return jobs[-1]

    yield make
    for job in jobs:
        job.end()


def at_step(number: int, happen):
    """Let something happen before a step of the worker "a"."""
    return lambda *place: happen() if place == ("a", "train_step", number) else None


def test_a_worker_that_loses_the_others_when_training_is_complete_has_its_summary_too(job_in, monkeypatch):
    def end_late(session, summary):
        found = end_together(session, summary)
        if session.backend.workers.rank == 1:
            raise PeerLostError("rank 0 ended before its answer was here")
        return found

    monkeypatch.setattr("hvdtrain.jobs.outcome.end_together", end_late)
    job = job_in(steps=3, eval_every=None)
    job.keeps_history = True
    job.run("a", "b")
    assert [outcome.status for outcome in job.outcomes.values()] == 2 * ["completed"]
    # "b" may ask for another world before "a" has left this one: then both enter one, which is reported
    kept = [line for line in job.outcomes["a"].history if line["phase"] != "event"]
    assert [(line["phase"], line["step"]) for line in kept] == [("train", 2), ("train", 3), ("eval", 3)]
    for name in ("history", "best", "final", "checkpoint"):
        assert getattr(job.outcomes["a"], name) == getattr(job.outcomes["b"], name) is not None
    assert job.memberships["b"].said[-1] == ("done", 0)


def test_a_checkpoint_that_was_lost_with_its_rank_zero_is_written_by_the_next(job_in, monkeypatch):
    write, lost = storage.write, []
    job = job_in(steps=7, save_every=4, eval_every=None)

    def slow(folder, state, manifest, check):
        if manifest.step == 4 and not lost:
            lost.append(manifest.step)
            job.is_over.wait()
            raise OSError("killed")
        return write(folder, state, manifest, check)

    monkeypatch.setattr(storage, "write", slow)
    job.loses_saves = True
    job.run("a", "b", before=at_step(6, lambda: job.kill("a")))
    assert job.outcomes["b"].status == "completed"
    assert lost == [4]
    assert job.saved() in ([5, 7], [4, 7])  # as far as the other worker came before the loss


def test_new_workers_alone_go_on_from_the_newest_checkpoint(job_in):
    job = job_in()

    def before(name: str, call: str, number: int) -> None:
        if (call, number) == ("train_step", 7):
            if name == "a":
                while job.outcomes.get("b") != "killed":
                    time.sleep(0.01)
                job.driver.expect("c")
                job.start("c", is_joining=True)
            job.kill(name)

    job.run("a", "b", before=before)
    assert [(size, source) for size, _, source in job.driver.worlds] == [(2, "start"), (1, "checkpoint")]
    assert job.outcomes["c"].status == "completed"
    lines = [json.loads(line) for line in (job.run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["phase"] == "train"] == [2, 4, 6, 8, 10]


def test_a_worker_that_has_trained_does_not_start_anew(job_in):
    """It lost its state before the first checkpoint: what its optimizer did is not undone."""
    job = job_in(save_every=None)

    def before(name: str, call: str, number: int) -> None:
        if (name, call, number) == ("a", "train_step", 4):
            job.driver.expect("c")
            job.start("c", is_joining=True)
            job.driver.torn.add("b")
            job.kill(name)
        if (name, call) == ("b", "broadcast_state") and job.driver.torn:
            pytest.fail("a state that is not as it was built is given to others")

    job.run("a", "b", before=before)
    assert isinstance(job.outcomes["b"], EnvironmentFault)
    assert job.memberships["b"].said[-1] == ("failed", job.outcomes["b"])
    assert job.outcomes["c"].status == "completed"
    assert job.calls["c"].count("train_step") == 10
    assert {source for _, _, source in job.driver.worlds[1:]} == {"checkpoint"}


def test_a_signal_to_the_launcher_stops_all_of_them_saved(job_in):
    job = job_in()

    def stop() -> None:
        job.driver.why_stop, job.driver.stop = "SIGTERM came", 15

    job.run("a", "b", before=at_step(6, stop))
    assert [type(outcome) for outcome in job.outcomes.values()] == [Stopped, Stopped]
    assert job.saved()[-1] in (7, 8)
    summary = json.loads((job.run_dir / "summary.json").read_text())
    assert (summary["status"], summary["error"]) == ("stopped", "SIGTERM came")


def test_an_error_of_the_code_is_told_and_summarised(job_in):
    job = job_in()
    job.run("a", before=at_step(5, lambda: {}["a bug"]))
    assert isinstance(job.outcomes["a"], WorkerFailure)
    (kind, error) = job.memberships["a"].said[-1]
    assert (kind, "a bug" in error.problem) == ("failed", True)
    assert json.loads((job.run_dir / "summary.json").read_text())["status"] == "failed"
