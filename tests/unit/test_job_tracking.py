"""What a job does for its trackers: it starts senders, shows what they say, and never waits for long."""

import hashlib
import json
import time

import pytest
from support.jobs import is_running
from support.watching import MEANS, Watched, run_context, step_info, summary

from hvdtrain.config import Config
from hvdtrain.elastic.events import END_SECONDS
from hvdtrain.jobs.git_state import GitState
from hvdtrain.jobs.provenance import Provenance
from hvdtrain.jobs.tracked_run import agree_on_id, tracking_of
from hvdtrain.tracking import job_tracking
from hvdtrain.tracking.folder import read_id, read_starts
from hvdtrain.tracking.job_tracking import JobTracking

ID = "0123456789abcdef"
STUCK = "import time; print('hello', flush=True); time.sleep(600)"
LISTENING = "import sys; print('heard', sys.stdin.read().strip(), flush=True)"


@pytest.fixture
def tracked(tmp_path, monkeypatch):
    """Gives what tracks a run whose senders do as a text of Python says, and what the user is shown."""
    folder, notes = tmp_path / "run", []
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("HOROVOD_RANK", "0")
    monkeypatch.setattr(job_tracking, "_MODULE", "fake_sender")
    monkeypatch.setattr(job_tracking, "LAST_SECONDS", 0.5)
    monkeypatch.setattr(job_tracking, "_GRACE_SECONDS", 60.0)
    monkeypatch.setattr(job_tracking, "_KILL_SECONDS", 60.0)

    def start(code: str) -> tuple[JobTracking, list[str]]:
        (tmp_path / "fake_sender.py").write_text(code)
        tracking = JobTracking(["mlflow"], ID, {"hosts": ["h1"]})
        tracking.on_start(run_context(folder, note=notes.append, steps_done=4, seconds=lambda: 2.5))
        return tracking, notes

    return start, folder


def shown(tracking: JobTracking, notes: list[str], count: int) -> None:
    """Report windows until there are that many notes."""
    until = time.monotonic() + 120
    while len(notes) < count and time.monotonic() < until:
        tracking.on_window(step_info(1), MEANS)
        time.sleep(0.02)


def test_the_job_is_noted_for_senders(tracked):
    start, folder = tracked
    tracking, _ = start(LISTENING)
    tracking.close()
    (found,) = read_starts(folder)
    assert read_id(folder) == ID
    assert abs(found.pop("time") - time.time()) < 60
    assert found == {"step": 4, "seconds": 2.5, "framework": "torch", "workers": 2, "hosts": ["h1"]}


@pytest.mark.parametrize("is_over", [True, False])
def test_senders_are_told_whether_the_job_is_over(tracked, is_over):
    tracking, notes = tracked[0](LISTENING)
    if is_over:
        tracking.on_end(summary())
    tracking.close()
    assert notes == ["heard over" if is_over else "heard left"]


def test_a_sender_knows_nothing_of_the_launcher(tracked):
    tracking, notes = tracked[0]("import os; print(os.environ.get('HOROVOD_RANK'))")
    shown(tracking, notes, 1)
    tracking.close()
    assert notes[0] == "None"


def test_a_sender_that_hangs_costs_nothing_and_is_killed(tracked, monkeypatch):
    tracking, notes = tracked[0](STUCK)
    shown(tracking, notes, 1)
    begun = time.perf_counter()
    for step in range(1000):
        tracking.on_window(step_info(step + 1), MEANS)
    assert time.perf_counter() - begun < 20
    (sender,) = tracking._senders
    monkeypatch.setattr(job_tracking, "_GRACE_SECONDS", 0.1)
    tracking.on_end(summary())
    begun = time.perf_counter()
    tracking.close()
    assert time.perf_counter() - begun < 30
    assert not is_running(sender._process.pid)
    assert notes[0] == "hello"
    assert "this run is sent (its sender did not end); to send them: python -m hvdtrain track" in notes[1]


def test_a_sender_that_dies_is_noted_once(tracked):
    tracking, notes = tracked[0]("raise SystemExit(3)")
    shown(tracking, notes, 1)
    tracking.on_window(step_info(2), MEANS)
    tracking.close()
    assert len(notes) == 1
    assert notes[0].startswith("MLflow: its sender ended with 3; not all of this run is sent")


def test_a_folder_that_cannot_be_written_is_noted(tracked):
    start, folder = tracked
    (folder / "tracking").write_text("a file")
    tracking, notes = start(LISTENING)
    tracking.close()
    assert len(notes) == 1
    assert "training continues" in notes[0]


def test_an_elastic_job_waits_for_what_rank_0_waits_for():
    longest = job_tracking._GRACE_SECONDS + job_tracking.LAST_SECONDS + job_tracking._KILL_SECONDS
    assert longest + 2 < END_SECONDS


def test_the_report_closes_it_last(tmp_path, tracked):
    class Closing:
        lines = 0

        def close(self) -> None:
            Closing.lines = len((tmp_path / "metrics.jsonl").read_text().splitlines())

        def on_end(self, summary) -> None:
            pass

    watched = Watched(tmp_path)
    watched.report._tracking = Closing()
    watched.report.on_start(8, 0)
    watched.log(8)
    watched.report.close()
    assert Closing.lines == 1


class Workers:
    """One worker."""

    rank, size, host = 0, 1, "here"

    def broadcast_object(self, value, root=0):
        return json.loads(json.dumps(value)) if isinstance(value, str) else value


def test_a_name_that_a_checkpoint_has_stays():
    plain, config = Config(framework="torch"), Config(framework="torch", track="mlflow")
    assert agree_on_id(plain, Workers(), None, in_place=False) is None
    assert agree_on_id(plain, Workers(), ID, in_place=False) == ID
    assert agree_on_id(config, Workers(), ID, in_place=True) == ID


def test_jobs_that_are_not_sent_have_no_sender():
    for names in ((), "tensorboard"):
        assert tracking_of(Config(framework="torch", track=names), ID, ["h"])() is None
    assert isinstance(tracking_of(Config(framework="torch", track="wandb"), ID, ["h"])(), JobTracking)


@pytest.mark.parametrize(("is_dirty", "changes"), [(True, "yes"), (False, "no"), (None, "unknown")])
def test_trackers_are_told_where_the_code_comes_from(tmp_path, is_dirty, changes):
    git, task = GitState("abc", is_dirty), tmp_path / "mine.py"
    came_from = Provenance(["python", "a b"], "/", ["h"], git, task, b"x = 1\n", {})
    made = tracking_of(Config(framework="torch", track="wandb"), ID, ["h"], provenance=came_from)()
    assert made._facts == {
        "hosts": ["h"],
        "command": "python 'a b'",
        "task_file": str(task),
        "task_sha256": hashlib.sha256(b"x = 1\n").hexdigest(),
        "commit": "abc",
        "uncommitted_changes": changes,
    }
