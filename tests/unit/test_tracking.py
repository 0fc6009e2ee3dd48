"""What is sent to trackers: lines once, in order, with their times; a job never waits for it for long."""

import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support.fakes import FakeWorkers
from support.watching import MEANS, run_context, step_info, summary

from hvdtrain.config import Config
from hvdtrain.config.values import check_installed
from hvdtrain.errors import ConfigError, EnvironmentFault, UsageError
from hvdtrain.jobs import track
from hvdtrain.jobs.track import agree_on_id
from hvdtrain.reporting.records import logged_values, stored_image
from hvdtrain.trackers import sender as sending
from hvdtrain.trackers.sender import JobTracking, Sender, describe_error, note_start, read_tracked_run
from hvdtrain.trackers.services import TrackedRun, WandbTracker, row_of

ID = "0123456789abcdef"


def line(step: int, loss: float | None = 0.5, phase: str = "train", **values) -> str:
    record = {"phase": phase, "step": step, "samples": step * 4, "epoch": step / 8, "loss": loss}
    return json.dumps({**record, **values, "workers": 2, "seconds": step * 1.5}) + "\n"


@pytest.fixture
def run_dir(tmp_path):
    """Gives a run directory with a config and no lines."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("framework: torch\nlearning_rate: 0.1\ntrack: [mlflow]\n")
    note_start(folder, TrackedRun(ID, 100.0))
    return folder


def write(folder: Path, *steps: int, loss: float = 0.5) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(line(step, loss) for step in steps)


class FakeTracker:
    """A tracker that keeps what it is sent; it fails while ``is_down``."""

    def __init__(self) -> None:
        self.place, self.is_down, self.refuses_checkpoints = "here", False, False
        self.runs, self.rows, self.ends = [], [], []
        self.waits_for = threading.Event()
        self.waits_for.set()

    def _ask(self) -> None:
        self.waits_for.wait()
        if self.is_down:
            raise ConnectionError("http://user:secret@tracker:1 refused")

    def open(self, run) -> str:
        self._ask()
        self.runs.append(run)
        return self.place

    def send(self, rows) -> None:
        self._ask()
        self.rows += [(row.step, row.values["train/loss"]) for row in rows]

    def checkpoint(self, folder) -> None:
        if self.refuses_checkpoints:
            raise ConnectionError("no space")
        self.ends.append(folder.name)

    def end(self, status, error) -> None:
        self._ask()
        self.ends.append(status)


@pytest.fixture
def tracker(monkeypatch):
    """Gives the tracker that is sent to."""
    made = FakeTracker()
    monkeypatch.setattr(sending, "CLIENTS", dict.fromkeys(sending.CLIENTS, lambda note: made))
    yield made
    made.waits_for.set()


@pytest.fixture
def checkpoint(run_dir, monkeypatch):
    """Gives a checkpoint that is good."""
    monkeypatch.setattr("hvdtrain.checkpoints.storage.verify", lambda path: None)
    folder = run_dir / "step-1"
    folder.mkdir()
    (folder / "file").write_text("x")
    return folder


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch):
    monkeypatch.setattr("hvdtrain.config.values.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="track wandb: the package wandb is not installed") as refused:
        check_installed(["tensorboard", "wandb"])
    assert "pip install wandb" in refused.value.remedy
    check_installed(["tensorboard"])


def test_a_line_is_numbers_by_phase_and_one_of_a_callback_has_texts_and_images():
    row = row_of(line(8, None, recall=True, note="x", slowest_rank=1).encode(), 100.0)
    assert row is not None
    assert (row.step, row.seconds, row.texts) == (8, 112.0, {})
    assert list(row.values) == ["train/loss", "train/slowest_rank", "samples", "epoch"]
    assert row.values["train/loss"] != row.values["train/loss"]  # NaN
    row = row_of(line(8, phase="callback", said="a\ud800", x={"image": "images/x.png"}, y={}).encode(), 0.0)
    assert row is not None
    assert list(row.values) == ["callback/loss", "samples", "epoch"]
    assert (row.texts, row.images) == ({"callback/said": "a?"}, {"callback/x": "images/x.png"})
    assert row_of(b'{"step": "x"}', 0.0) is None


def test_a_resumed_run_is_one_run_whose_lines_are_sent_once(run_dir, tracker):
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write("torn\n")  # said, and left out
    write(run_dir, 10, 20)
    Sender(run_dir, "mlflow", print).end("stopped")
    facts = {"step": 20, "changes": ["workers 2 -> 3"]}
    note_start(run_dir, TrackedRun(ID, 90.0, facts))
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(line(30) + line(40)[:9])
    again = Sender(run_dir, "mlflow", print)
    again.send()
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(line(40)[9:])
    again.send()
    assert [step for step, _ in tracker.rows] == [10, 20, 30, 40]
    assert tracker.ends == ["stopped"]
    assert [run.id for run in tracker.runs] == [ID, ID]
    assert [run.resumed for run in tracker.runs] == ["", "after step 20: workers 2 -> 3"]
    assert tracker.runs[0].config == {"framework": "torch", "learning_rate": 0.1}


def test_a_refused_checkpoint_does_not_keep_back_the_end(run_dir, tracker, checkpoint):
    tracker.refuses_checkpoints = True
    write(run_dir, 1)
    notes: list[str] = []
    sender = Sender(run_dir, "mlflow", notes.append)
    sender.checkpoint = checkpoint
    with pytest.raises(ConnectionError):
        sender.send()
    sender.end("completed")
    assert (tracker.rows, tracker.ends) == ([(1, 0.5)], ["completed"])
    assert notes[1:] == [f"MLflow: {run_dir}/step-1 is not sent: no space"]


def test_a_checkpoint_stays_while_it_is_sent(run_dir, tracker, checkpoint, monkeypatch):
    def send(folder: Path) -> None:
        (checkpoint / "file").unlink()
        checkpoint.rmdir()
        tracker.ends.append((folder / "file").read_text())

    monkeypatch.setattr(tracker, "checkpoint", send)
    (run_dir / "tracking" / "sending-mlflow-x").mkdir()  # of a job that was killed
    sender = Sender(run_dir, "mlflow", print)
    for _ in range(2):  # it is gone the second time
        sender.checkpoint = checkpoint
        sender.send()
    assert tracker.ends == ["x"]
    assert list((run_dir / "tracking").glob("sending-*")) == []


def test_a_thread_that_is_too_slow_sends_and_writes_nothing_more(run_dir, tracker, monkeypatch):
    write(run_dir, 1)
    sender = Sender(run_dir, "mlflow", print)
    monkeypatch.setattr(tracker, "send", lambda rows: sender.is_abandoned.set())  # while a server is awaited
    with pytest.raises(sending.Abandoned):
        sender.end("completed")
    assert (tracker.ends, (run_dir / "tracking" / "mlflow.json").exists()) == ([], False)


def test_a_state_that_cannot_be_read_begins_anew_and_its_folder_does_not_lead_elsewhere(run_dir, tracker):
    write(run_dir, 1)
    for text in ("{", '{"lines": -1}'):
        (run_dir / "tracking" / "mlflow.json").write_text(text)
        Sender(run_dir, "mlflow", print).send()
    assert tracker.rows == 2 * [(1, 0.5)]
    (run_dir / "tracking").rename(run_dir.parent / "else")
    (run_dir / "tracking").symlink_to(run_dir.parent / "else")
    with pytest.raises(OSError, match="leads out of"):
        note_start(run_dir, TrackedRun(ID, 0.0))


@pytest.fixture
def job(run_dir, monkeypatch):
    """Gives what starts tracking a run as a job does, and what the user is shown."""
    notes: list[str] = []
    monkeypatch.setattr(sending, "_POLL_SECONDS", 0.01)

    def start(*names: str) -> tuple[JobTracking, list[str]]:
        tracking = JobTracking(names or ["mlflow"], run_dir, ID, {"hosts": ["h1"]}, with_checkpoints=True)
        tracking.on_start(run_context(run_dir, note=notes.append, steps_done=4, seconds=lambda: 2.5))
        return tracking, notes

    return start


def wait_for(condition) -> None:
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_tracker_that_hangs_costs_some_seconds_at_the_end_and_does_not_hold_up_another_one(
    job, run_dir, tracker, monkeypatch
):
    tracker.waits_for.clear()
    other = FakeTracker()
    monkeypatch.setitem(sending.CLIENTS, "wandb", lambda note: other)
    monkeypatch.setattr(sending, "LAST_SECONDS", 0.5)
    tracking, notes = job("mlflow", "wandb")
    write(run_dir, 1)
    wait_for(lambda: other.rows)
    write(run_dir, 2)
    begun = time.perf_counter()
    for step in range(1000):
        tracking.on_window(step_info(step + 1), MEANS)
    tracking.on_end(summary())
    tracking.close()
    assert time.perf_counter() - begun < 20
    assert (other.rows, other.ends) == ([(1, 0.5), (2, 0.5)], ["completed"])
    assert notes[0] == "Weights & Biases: this run is here"
    assert notes[1].startswith("MLflow: 2 lines of metrics.jsonl and how the run ended are not sent (after")
    assert notes[1].endswith(f"to send the rest: python -m hvdtrain track {run_dir} --to mlflow")


def test_an_error_of_the_user_is_noted_and_not_tried_again(job, monkeypatch):
    calls: list[float] = []

    def refuse(note) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise ConnectionError("refused")
        raise EnvironmentFault("MLFLOW_TRACKING_URI is not set", "Set it.")

    monkeypatch.setitem(sending.CLIENTS, "mlflow", refuse)
    tracking, notes = job()
    wait_for(lambda: len(notes) == 2)
    tracking.on_end(summary())
    tracking.close()
    assert (len(calls), len(notes)) == (2, 3)
    assert notes[1] == "MLflow: MLFLOW_TRACKING_URI is not set. Set it; training continues"
    assert notes[2].startswith("MLflow: how the run ended is not sent (MLFLOW_TRACKING_URI is not set. Set")


def test_a_tracker_that_is_down_is_noted_once_and_again_when_it_answers(job, run_dir, tracker):
    tracker.is_down = True
    tracking, notes = job()
    write(run_dir, 1)
    wait_for(lambda: notes)
    tracker.is_down = False
    wait_for(lambda: tracker.rows)
    tracking.on_end(summary())
    tracking.close()
    assert notes[0] == "MLflow: http://tracker:1 refused; training continues"
    assert [note[:17] for note in notes[1:]] == ["MLflow: this run ", "MLflow: it answer"]
    assert "secret" not in "".join(path.read_text() for path in (run_dir / "tracking").iterdir())


@pytest.mark.parametrize("kind", [ConnectionError, EnvironmentFault])
def test_an_error_is_shown_without_what_may_be_secret(kind):
    for address in ("mssql+pyodbc:///?odbc_connect=x;PWD%3Dpw", "postgresql://u:12/pw@h", "/api?passwd=pw"):
        text = describe_error(kind(f"{address} failed"))
        assert "pw" not in text
        assert text.endswith(" failed")


def test_a_name_that_a_checkpoint_or_the_run_directory_has_stays(run_dir):
    plain, workers = Config(framework="torch"), FakeWorkers(0, ["here"], threading.Barrier(1), [b""])
    config = Config(framework="torch", track="mlflow", run_dir=str(run_dir))
    assert agree_on_id(plain, workers, None, in_place=False) is None
    assert agree_on_id(plain, workers, "of0checkpoint", in_place=False) == "of0checkpoint"
    assert agree_on_id(config, workers, None, in_place=True) == ID
    assert agree_on_id(config, workers, None, in_place=False) != ID


def test_wandb_has_texts_and_images_of_callbacks_and_a_run_of_the_tasks_own_stays_apart(
    run_dir, tmp_path, monkeypatch
):
    wandb = pytest.importorskip("wandb")
    for name, value in (("WANDB_SILENT", "true"), ("WANDB_MODE", "offline")):
        monkeypatch.setenv(name, value)
    values, files = logged_values(6, {"said": "a <b>", "x": np.zeros((2, 2), np.uint8)})
    ((place, png),) = files.items()
    (run_dir / "images").mkdir()
    (run_dir / place).write_bytes(png)
    for name in ("y", "z"):  # which can only be seen when it is read
        (run_dir / f"images/step-00000006-{name}.png").write_bytes(png[:20])
        values[name] = {"image": f"images/step-00000006-{name}.png"}
    notes: list[str] = []
    own = wandb.init(dir=tmp_path)
    try:
        tracker = WandbTracker(notes.append)
        tracker.open(read_tracked_run(run_dir))
        assert wandb.run is own
        tracker.send([row_of(line(6, phase="callback", **values).encode(), 0.0)])
        tracker.end("completed", "")
        own.log({"mine": 1.0})  # it has not ended
    finally:
        wandb.teardown()
    media = next((run_dir / "wandb").glob("offline-run-*/files/media"))
    assert [path.read_bytes() for path in media.rglob("*.png")] == [png]
    assert [path.read_text() for path in media.rglob("*.html")] == ["<pre>a &lt;b&gt;</pre>"]
    assert [note.partition(":")[0] for note in notes if "left out" in note] == [
        "images/step-00000006-y.png is left out, and other texts and images may be"
    ]


def test_an_image_is_a_file_of_the_run_directory_and_no_link(run_dir):
    secret = run_dir.parent / "images" / "step-00000001-x.png"
    secret.parent.mkdir()
    secret.write_bytes(b"\x89PNG\r\n\x1a\n")
    images, place = run_dir / "images", "images/step-00000001-x.png"
    images.symlink_to(secret.parent)
    with pytest.raises(OSError, match="leads out of"):
        stored_image(run_dir, place)
    images.unlink()
    images.mkdir()
    with pytest.raises(FileNotFoundError):
        stored_image(run_dir, place)
    (run_dir / place).symlink_to(secret)
    with pytest.raises(OSError, match="it is a link"):
        stored_image(run_dir, place)
    (run_dir / place).unlink()
    (run_dir / place).write_text("%!PS")
    with pytest.raises(OSError, match="not a PNG file"):
        stored_image(run_dir, place)
    for other in (f"../{place}", str(secret), "images/step-00000001-x/../../y.png", f"{place}\n"):
        with pytest.raises(OSError, match="no image has this name"):
            stored_image(run_dir, other)
    (run_dir / place).write_bytes(secret.read_bytes())
    assert stored_image(run_dir, place) == run_dir / place


def test_the_command_refuses_what_it_cannot_send(run_dir):
    for name, text in (("mlfow", "there is no tracker 'mlfow'"), ("tensorboard", "TensorBoard reads")):
        with pytest.raises(UsageError, match=text):
            track.track_runs([run_dir], [name], False, print)
