"""What is sent to trackers: lines once, in order, with their times; and what becomes of a step back."""

import errno
import json
import os
import threading
from contextlib import suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from hvdtrain.checkpoints.linked_copy import copied
from hvdtrain.checkpoints.manifest import CorruptCheckpoint
from hvdtrain.config import Config, Layer
from hvdtrain.config_layers import resolve
from hvdtrain.errors import ConfigError, EnvironmentFault, UsageError
from hvdtrain.jobs import track
from hvdtrain.reporting.jsonl import cut_log
from hvdtrain.trackers import check_installed
from hvdtrain.tracking import loading, process
from hvdtrain.tracking.folder import add_start, read_id, read_starts, without_password, write_id
from hvdtrain.tracking.process import LEFT, OVER, Following
from hvdtrain.tracking.rows import Clock, row_of
from hvdtrain.tracking.sender import Sender, lines_to_send
from hvdtrain.tracking.sender_lock import lock_file, take
from hvdtrain.tracking.sent_lines import SentLines
from hvdtrain.tracking.state import SenderState
from hvdtrain.tracking.tracker import TrackedRun
from hvdtrain.tracking.wandb_tracker import WandbTracker

ID = "0123456789abcdef"


def line(step: int, loss: float = 0.5, phase: str = "train", **values) -> str:
    record = {"phase": phase, "step": step, "samples": step * 4, "epoch": step / 8, "loss": loss}
    return json.dumps({**record, **values, "workers": 2, "seconds": step * 1.5}) + "\n"


@pytest.fixture
def run_dir(tmp_path):
    """Gives a run directory with a config and no lines."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.yaml").write_text("framework: torch\nlearning_rate: 0.1\ntrack: [mlflow]\n")
    write_id(folder, ID)
    return folder


def write(folder: Path, *steps: int, loss: float = 0.5) -> None:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(line(step, loss) for step in steps)


class FakeTracker:
    """A tracker that keeps what it is told; it fails while ``is_down``."""

    def __init__(self, is_known: bool = True) -> None:
        self.notes: list[str] = []
        self.ends_last = self.refuses_checkpoints = False
        self.is_known, self.is_down = is_known, False
        self.rows, self.starts, self.repeated, self.ends, self.names = [], [], [], [], []
        self.opened, self.is_there = 0, False

    def __call__(self):
        return self

    def _ask(self) -> None:
        if self.is_down:
            raise ConnectionError("http://user:secret@tracker:1 refused")

    def open(self, run, state) -> bool:
        self._ask()
        state.target, state.run = "here", ID
        self.opened += 1
        return self.is_known

    def is_up_to_date(self, state) -> bool:
        return self.is_there

    def start(self, start, number) -> None:
        self.starts.append((start["step"], number))

    def send(self, rows) -> None:
        self._ask()
        self.rows += [(row.step, row.values["train/loss"]) for row in rows]

    def repeat(self, first, last) -> None:
        self.repeated.append((first, last))

    def checkpoint(self, folder) -> None:
        if self.refuses_checkpoints:
            raise ConnectionError("no space")
        self.names.append(folder.name)

    def end(self, status, summary) -> None:
        self._ask()
        self.ends.append(status)


def sender_of(folder: Path, tracker: FakeTracker, with_checkpoints: bool = False) -> Sender:
    return Sender(TrackedRun(folder, ID), "mlflow", tracker, with_checkpoints)


def add_checkpoint(folder: Path, name: str = "step-00000001") -> None:
    checkpoint = folder / "checkpoints" / name
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}")


@pytest.mark.parametrize("given", ["mlflow,wandb", ["mlflow", "wandb"], ("mlflow, wandb", "mlflow")])
def test_trackers_are_given_as_a_list_or_with_commas(given):
    assert Config(framework="torch", track=given).track == ("mlflow", "wandb")


def test_a_wrong_name_is_refused_with_the_right_ones():
    with pytest.raises(ConfigError, match="track: there is no tracker 'mlfow'; there are mlflow, wandb, "):
        resolve([Layer("options", {"framework": "torch", "track": ("mlfow",)})])


def test_a_tracker_that_is_not_installed_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr("hvdtrain.trackers.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="track wandb: the package wandb is not installed") as refused:
        check_installed(["tensorboard", "wandb"])
    assert "pip install 'hvdtrain[wandb]'" in refused.value.remedy
    check_installed(["tensorboard"])


def test_a_folder_is_no_installed_package(monkeypatch, tmp_path):
    (tmp_path / "wandb_like").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("hvdtrain.trackers.TRACKERS", {"x": type("Row", (), {"package": "wandb_like"})()})
    with pytest.raises(ConfigError, match="not installed"):
        check_installed(["x"])


def test_lines_are_sent_once(tmp_path):
    log, sent = tmp_path / "log", tmp_path / "sent"
    log.write_text("a\nb\nhalf")
    lines = SentLines(log, sent)
    assert lines.unsent(1) == [b"a\n"]
    lines.mark_sent([b"a\n"])
    assert SentLines(log, sent).unsent(9) == lines.unsent(9) == [b"b\n"]
    lines.mark_sent([b"b\n"])
    with log.open("a") as file:
        file.write(" a line\nc\n")
    assert SentLines(log, sent).unsent(9) == lines.unsent(9) == [b"half a line\n", b"c\n"]


@pytest.mark.parametrize("is_live", [True, False])
def test_what_replaces_lines_that_were_sent_is_sent(tmp_path, is_live):
    log, sent = tmp_path / "log", tmp_path / "sent"
    log.write_text("a\nb\nc\n")
    lines = SentLines(log, sent)
    lines.mark_sent(lines.unsent(9))
    log.write_text("a\nB\nC\nd\n")
    lines = lines if is_live else SentLines(log, sent)
    assert lines.unsent(9) == [b"B\n", b"C\n", b"d\n"]
    lines.mark_sent(lines.unsent(9))
    assert SentLines(log, sent).remaining() == 0


def test_a_log_that_is_gone_or_made_anew_is_followed(tmp_path):
    log = tmp_path / "log"
    lines = SentLines(log, tmp_path / "sent")
    assert lines.unsent(9) == []
    log.write_text("a\n")
    lines.mark_sent(lines.unsent(9))
    log.unlink()
    assert lines.unsent(9) == []
    log.write_text("a\nb\n")
    assert lines.unsent(9) in ([b"b\n"], [b"a\n", b"b\n"])


def test_a_line_is_numbers_by_phase():
    row = row_of(line(8, None, recall=True, note="x", slowest_rank=1).encode(), Clock([], 100.0))
    assert row is not None
    assert row.step == 8
    assert row.seconds == 112.0
    assert row.is_window
    assert list(row.values) == ["train/loss", "train/slowest_rank"]
    assert row.values["train/loss"] != row.values["train/loss"]  # NaN
    assert row.axes == {"samples": 32.0, "epoch": 1.0}


@pytest.mark.parametrize(
    "text", ["", "x", "[]", '{"step": "1", "phase": "train"}', '{"phase": 3}', '{"step": 1}']
)
def test_what_is_no_line_of_a_run_is_passed_over(text):
    assert row_of(text.encode(), Clock([], 0.0)) is None


def test_a_change_of_the_workers_is_a_row_with_words():
    text = line(4, phase="event", pause_seconds=2.5, left=["rank 2 on h2"], joined=[])
    row = row_of(text.encode(), Clock([], 0.0))
    assert row is not None
    assert row.values == {"event/workers": 2.0, "event/pause_seconds": 2.5}
    assert row.event == "2 workers from step 4 on; left: rank 2 on h2"


def test_times_are_those_of_the_job_that_wrote_the_line():
    starts = [
        {"step": 0, "time": 1000.0, "seconds": 0.0},
        {"step": 400, "time": 5000.0, "seconds": 40.0},
        {"step": 200, "time": 9000.0, "seconds": 20.0},
    ]
    clock = Clock(starts, 7.0)
    assert clock.job_at(150) == (1000.0, 1)
    assert clock.job_at(250) == (8980.0, 3)
    assert Clock(starts[:2], 0.0).job_at(450) == (4960.0, 2)
    assert Clock([{"step": 0}], 7.0).job_at(1) == (7.0, 1)


def test_a_resumed_run_is_one_run_whose_steps_grow(run_dir):
    tracker = FakeTracker()
    add_start(run_dir, {"step": 0, "time": 1.0, "seconds": 0.0})
    write(run_dir, 10, 20)
    sender = sender_of(run_dir, tracker)
    sender.round()
    sender.end("stopped")
    add_start(run_dir, {"step": 20, "time": 2.0, "seconds": 30.0})
    write(run_dir, 30)
    again = sender_of(run_dir, tracker)
    again.round()
    again.round()
    assert [step for step, _ in tracker.rows] == [10, 20, 30]
    assert tracker.starts == [(0, 0), (20, 1)]
    assert (tracker.repeated, tracker.ends) == ([], ["stopped"])


def test_steps_that_are_done_again_are_sent_again_and_said(run_dir):
    tracker = FakeTracker()
    write(run_dir, 10, 20, 30, 40)
    sender_of(run_dir, tracker).round()
    cut_log(run_dir / "metrics.jsonl", 20)
    resumed = sender_of(run_dir, tracker)
    resumed.round()
    write(run_dir, 30, 40, 50, loss=0.25)
    resumed.round()
    write(run_dir, 60, loss=0.25)
    resumed.round()
    assert tracker.rows[4:] == [(30, 0.25), (40, 0.25), (50, 0.25), (60, 0.25)]
    assert tracker.repeated == [(30, 40)]


class KilledTracker(FakeTracker):
    """A tracker whose process is killed when it has sent the next lines."""

    def send(self, rows) -> None:
        super().send(rows)
        raise KeyboardInterrupt


def test_steps_on_their_way_when_the_sender_was_killed_are_among_the_repeated(run_dir):
    tracker = KilledTracker()
    write(run_dir, 10, 20, 30, 40)
    with pytest.raises(KeyboardInterrupt):
        sender_of(run_dir, tracker).round()
    cut_log(run_dir / "metrics.jsonl", 20)
    write(run_dir, 30, 40, 50, loss=0.25)
    resumed = FakeTracker()
    sender_of(run_dir, resumed).round()
    assert resumed.repeated == [(10, 40)]


def test_lines_that_a_killed_sender_sent_are_not_said_to_be_repeated(run_dir):
    write(run_dir, 10, 20)
    with pytest.raises(KeyboardInterrupt):
        sender_of(run_dir, KilledTracker()).round()
    write(run_dir, 30)
    resumed = FakeTracker()
    sender_of(run_dir, resumed).round()
    assert [step for step, _ in resumed.rows] == [10, 20, 30]  # a line that is sent twice is one point
    assert resumed.repeated == []


def test_a_run_without_news_is_not_opened(run_dir, verified):
    write(run_dir, 1, 2)
    tracker = FakeTracker()
    tracker.is_there = True
    sender_of(run_dir, tracker).end("completed")
    for _ in range(2):
        sender_of(run_dir, tracker).end("completed")
        sender_of(run_dir, tracker).round()
    assert (tracker.opened, tracker.ends) == (1, ["completed"])
    sender_of(run_dir, tracker).end("failed")
    write(run_dir, 3)
    sender_of(run_dir, tracker).end("failed")
    add_start(run_dir, {"step": 3})
    sender_of(run_dir, tracker).end("failed")
    add_checkpoint(run_dir)
    sender_of(run_dir, tracker, with_checkpoints=True).end("failed")
    assert (tracker.opened, tracker.names) == (5, ["step-00000001"]), "each of these is news"
    tracker.is_there = False
    sender_of(run_dir, tracker).end("failed")
    assert tracker.opened == 6


@pytest.mark.parametrize(
    ("environ", "is_there"),
    [
        ({"WANDB_MODE": "offline"}, True),
        ({"WANDB_MODE": "offline", "WANDB_PROJECT": "mine"}, True),
        ({"WANDB_MODE": "offline", "WANDB_PROJECT": "other"}, False),
        ({"WANDB_MODE": "offline", "WANDB_ENTITY": "other"}, False),
        ({}, False),
    ],
)
def test_wandb_offline_opens_no_folder_for_nothing(tmp_path, monkeypatch, environ, is_there):
    for name in ("WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    tracker = WandbTracker.__new__(WandbTracker)
    assert tracker.is_up_to_date(SenderState("/mine", ID, unfinished=[str(tmp_path)])) == is_there
    assert not tracker.is_up_to_date(SenderState("/mine", ID, unfinished=[str(tmp_path / "gone")]))


def test_an_outage_loses_nothing(run_dir):
    tracker = FakeTracker()
    write(run_dir, 1, 2)
    sender = sender_of(run_dir, tracker)
    sender.round()
    tracker.is_down = True
    write(run_dir, 3)
    with pytest.raises(ConnectionError):
        sender.round()
    assert lines_to_send(run_dir, "mlflow") == 1
    write(run_dir, *range(4, 1000))
    tracker.is_down = False
    sender.round()
    assert [step for step, _ in tracker.rows] == list(range(1, 1000))
    assert tracker.repeated == []
    assert lines_to_send(run_dir, "mlflow") == 0


def test_another_run_of_the_tracker_gets_all_lines(run_dir):
    write(run_dir, 1, 2)
    sender_of(run_dir, FakeTracker()).round()
    other = FakeTracker(is_known=False)
    sender_of(run_dir, other).round()
    assert [step for step, _ in other.rows] == [1, 2]


@pytest.fixture
def verified(monkeypatch):
    """Gives the names of the checkpoints that were verified; each is good."""
    found: list[str] = []
    monkeypatch.setattr("hvdtrain.checkpoints.verification.verify", lambda path: found.append(path.name))
    return found


def test_a_store_that_refuses_checkpoints_does_not_keep_back_the_end(run_dir, verified):
    tracker = FakeTracker()
    tracker.refuses_checkpoints = True
    write(run_dir, 1)
    add_checkpoint(run_dir)
    sender = sender_of(run_dir, tracker, with_checkpoints=True)
    for _ in range(2):
        with pytest.raises(ConnectionError):
            sender.end("completed")
    assert (tracker.rows, tracker.ends) == ([(1, 0.5)], ["completed"])
    tracker.refuses_checkpoints = False
    sender.end("completed")
    assert (tracker.names, tracker.ends) == (["step-00000001"], ["completed"])


def test_a_checkpoint_precedes_an_end_after_which_none_is_taken(run_dir, verified):
    tracker = FakeTracker()
    tracker.ends_last = True
    tracker.names = tracker.ends
    add_checkpoint(run_dir)
    sender_of(run_dir, tracker, with_checkpoints=True).end("completed")
    assert tracker.ends == ["step-00000001", "completed"]


def test_a_bad_checkpoint_is_read_once(run_dir, monkeypatch):
    verify = Mock(side_effect=CorruptCheckpoint("bad"))
    monkeypatch.setattr("hvdtrain.checkpoints.verification.verify", verify)
    add_checkpoint(run_dir)
    tracker = FakeTracker()
    sender = sender_of(run_dir, tracker, with_checkpoints=True)
    for _ in range(3):
        sender.round()
    assert (verify.call_count, tracker.names) == (1, [])


def test_a_sender_removes_what_one_that_was_killed_left(run_dir):
    left = run_dir / "tracking" / "sending-mlflow-x"
    left.mkdir()
    sender_of(run_dir, FakeTracker())
    assert not left.exists()


@pytest.mark.parametrize("fails", ["open", "forget"])
def test_another_run_gets_all_lines_also_if_it_fails_once(run_dir, monkeypatch, fails):
    """The tracker has noted where its run is before it fails, or the disk is full."""

    class OtherTracker(FakeTracker):
        def open(self, run, state) -> bool:
            is_known = state.run == "another"
            state.run = "another"
            if fails == "open" and not self.ends:
                self.ends.append("failed")
                raise ConnectionError
            return is_known

    write(run_dir, 1, 2)
    sender_of(run_dir, FakeTracker()).round()
    other = OtherTracker()
    sender = sender_of(run_dir, other)
    with monkeypatch.context() as full:
        if fails == "forget":
            full.setattr("hvdtrain.tracking.sent_lines.write_parts", Mock(side_effect=OSError))
        with pytest.raises(OSError):  # noqa: PT011 - ConnectionError is one
            sender.round()
    sender.round()
    assert [step for step, _ in other.rows] == [1, 2]
    assert SenderState.read(run_dir / "tracking" / "mlflow.json").run == "another"


def following(run_dir, tracker, monkeypatch, word: bytes) -> list[str]:
    """Follow a run whose job says a word and no more; give what the user is shown."""
    said: list[str] = []
    monkeypatch.setattr(process, "LOADERS", {"mlflow": tracker})
    monkeypatch.setattr(process, "_LAST_ATTEMPTS", 1)
    monkeypatch.setattr(process.time, "sleep", lambda seconds: None)
    monkeypatch.setattr(process.os, "_exit", lambda code: said.append(f"exit {code}"))
    reading, writing = os.pipe()
    os.write(writing, word)
    os.close(writing)
    Following(run_dir, "mlflow", said.append, job=reading).run()
    os.close(reading)
    return said


@pytest.mark.parametrize(
    ("word", "summary", "ends"),
    [
        (OVER, {"status": "completed", "final": {}}, ["completed"]),
        (OVER, {"status": "failed", "error": "x", "final": {}}, ["failed"]),
        (b"", None, ["killed"]),
        (b"", {"final": []}, ["unknown"]),
        (LEFT, {"status": "completed"}, []),
    ],
)
def test_the_end_of_a_job_is_sent(run_dir, monkeypatch, word, summary, ends):
    write(run_dir, 1)
    if summary:
        (run_dir / "summary.json").write_text(json.dumps(summary))
    tracker = FakeTracker()
    said = following(run_dir, tracker, monkeypatch, word)
    assert tracker.ends == ends
    assert said == ([f"MLflow: this run is {ID} of here"] if ends else [])


def test_what_is_not_sent_is_said_with_the_command_that_sends_it(run_dir, monkeypatch):
    write(run_dir, 1, 2)
    tracker = FakeTracker()
    tracker.is_down = True
    said = following(run_dir, tracker, monkeypatch, OVER)
    assert said == [
        "MLflow: http://tracker:1 refused; training continues, and sending is tried again",
        f"MLflow: 2 lines of metrics.jsonl are not sent (http://tracker:1 refused); to send them: "
        f"python -m hvdtrain track {run_dir} --to mlflow",
        "exit 1",
    ]
    assert process.unsent(run_dir, "mlflow", with_checkpoints=True).endswith(" --to mlflow --checkpoints")
    assert "secret" not in "".join(path.read_text() for path in (run_dir / "tracking").iterdir())


def test_an_upload_that_is_under_way_at_the_end_leaves_no_run_open_without_a_word(
    run_dir, monkeypatch, verified, capfd
):
    write(run_dir, 1)
    add_checkpoint(run_dir)
    (run_dir / "summary.json").write_text(json.dumps({"status": "completed", "final": {}}))
    tracker, is_given_up, said = FakeTracker(), threading.Event(), []
    reading, writing = os.pipe()

    def upload(folder: Path) -> None:
        os.write(writing, OVER)
        assert is_given_up.wait(20)
        raise SystemExit

    monkeypatch.setattr(tracker, "checkpoint", upload)
    monkeypatch.setattr(process, "LOADERS", {"mlflow": tracker})
    monkeypatch.setattr(process, "LAST_SECONDS", 0.1)
    monkeypatch.setattr(process, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(process.os, "_exit", lambda code: is_given_up.set())
    with suppress(SystemExit):
        Following(run_dir, "mlflow", said.append, with_checkpoints=True, job=reading).run()
    for file in (reading, writing):
        os.close(file)
    text = (
        "MLflow: how the run ended is not sent (still at work 0.1 s after the end of the job); "
        f"to send it: python -m hvdtrain track {run_dir} "
        "--to mlflow --checkpoints; until then MLflow shows it as running"
    )
    assert said == [text]
    assert text in capfd.readouterr().err, "the log has it, too"
    assert sender_of(run_dir, FakeTracker()).state.status == ""


@pytest.fixture
def command(run_dir, monkeypatch):
    """Gives a tracker, and what sends the run to it as the command does."""
    tracker = FakeTracker()
    monkeypatch.setattr(track, "LOADERS", {"mlflow": tracker, "wandb": tracker})
    monkeypatch.setattr(track, "check_installed", lambda names: None)

    def send(*names: str) -> list[str]:
        said: list[str] = []
        track.track_runs([run_dir], names, False, said.append)
        return said

    return tracker, send


def test_a_run_that_was_never_tracked_is_sent_by_the_command(run_dir, command):
    tracker, send = command
    (run_dir / "tracking" / "id.json").unlink()
    write(run_dir, 1, 2)
    (run_dir / "summary.json").write_text('{"status": "completed", "final": {}}')
    assert send() == [f"MLflow: {run_dir} is sent; this run is {ID} of here"]
    assert [step for step, _ in tracker.rows] == [1, 2]
    assert tracker.ends == ["completed"]
    assert read_id(run_dir) is not None


@pytest.mark.parametrize(
    ("names", "error", "text"),
    [
        (("mlfow",), UsageError, "--to: there is no tracker 'mlfow'"),
        (("tensorboard",), UsageError, "TensorBoard reads the files"),
    ],
)
def test_the_command_refuses_what_it_cannot_send(command, names, error, text):
    with pytest.raises(error, match=text):
        command[1](*names)


def test_the_command_says_that_a_tracker_does_not_answer(command, run_dir):
    command[0].is_down = True
    with pytest.raises(EnvironmentFault, match="MLflow: http://tracker:1 refused"):
        command[1]()


def test_the_command_refuses_what_is_no_run(tmp_path, command):
    with pytest.raises(UsageError, match="no run directory"):
        loading.tracked_run(tmp_path)


def test_a_state_that_cannot_be_read_begins_anew(tmp_path):
    path = tmp_path / "state.json"
    for text in ("", "{", '{"starts": "x"}', "[]"):
        path.write_text(text)
        assert SenderState.read(path) == SenderState()
    SenderState("a", "b", starts=2, checkpoints=["c"]).write(path)
    assert SenderState.read(path) == SenderState("a", "b", starts=2, checkpoints=["c"])


def test_a_folder_that_is_being_sent_needs_no_remedy():
    state = SenderState("here", "run", unfinished=["wandb/run-2"], sending="wandb/run-2")
    assert state.where() == "this run is run of here"
    state.unfinished.insert(0, "wandb/run-1")
    assert state.where().endswith("; wandb sync --include-online wandb/run-1 sends what is only there")


@pytest.mark.parametrize(
    ("number", "is_taken"), [(errno.EAGAIN, False), (errno.EACCES, False), (errno.ENOLCK, True)]
)
def test_a_file_system_without_locks_keeps_no_sender_out(run_dir, monkeypatch, number, is_taken):
    monkeypatch.setattr("fcntl.fcntl", Mock(side_effect=OSError(number, "no")))
    with lock_file(run_dir, "mlflow") as lock:
        assert take(lock) is is_taken


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/nowhere")])
def test_a_lock_that_is_no_file_is_refused(run_dir, make):
    make(run_dir / "tracking" / "mlflow.lock")
    with pytest.raises(OSError), lock_file(run_dir, "mlflow"):  # noqa: PT011 - of two kinds
        pass


def test_starts_that_cannot_be_read_are_passed_over(run_dir):
    add_start(run_dir, {"step": 1})
    with (run_dir / "tracking" / "starts.jsonl").open("a") as file:
        file.write("{}\n[]\nx\n")
    add_start(run_dir, {"step": 2})
    assert [start["step"] for start in read_starts(run_dir)] == [1, 2]


def test_a_tracking_folder_that_leads_elsewhere_is_not_followed(tmp_path):
    (tmp_path / "else").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tracking").symlink_to(tmp_path / "else")
    with pytest.raises(OSError, match="leads out of"):
        write_id(tmp_path / "run", ID)


def test_a_checkpoint_stays_while_it_is_sent(tmp_path):
    checkpoint = tmp_path / "step-1"
    checkpoint.mkdir()
    (checkpoint / "file").write_text("x")
    with copied(checkpoint, tmp_path, "mlflow") as folder:
        (checkpoint / "file").unlink()
        checkpoint.rmdir()
        assert folder is not None
        assert (folder / "file").read_text() == "x"
    (tmp_path / "sending-mlflow-x").mkdir()  # of a sender that was killed
    with copied(checkpoint, tmp_path, "mlflow") as gone:
        assert gone is None
    assert list(tmp_path.glob("sending-*")) == []


def test_what_is_of_another_run_is_set_aside(run_dir):
    add_start(run_dir, {"step": 1})
    write_id(run_dir, "another0run")
    assert (read_id(run_dir), read_starts(run_dir)) == ("another0run", [])
    assert (run_dir / f"tracking-of-{ID}" / "starts.jsonl").is_file()


@pytest.mark.parametrize("fails", ["append", "__init__"])
def test_hashes_that_could_not_be_written_follow(tmp_path, monkeypatch, fails):
    log, sent = tmp_path / "log", tmp_path / "sent"
    log.write_text("a\nb\n")
    lines = SentLines(log, sent)
    with monkeypatch.context() as full:
        error = OSError("full")
        instead = Mock(return_value=error) if fails == "append" else Mock(side_effect=error)
        full.setattr(f"hvdtrain.tracking.sent_lines.AppendFile.{fails}", instead)
        with pytest.raises(OSError, match="full"):
            lines.mark_sent([b"a\n"])
    assert lines.unsent(9) == [b"b\n"]
    lines.mark_sent([b"b\n"])
    assert SentLines(log, sent).remaining() == 0


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("to https://me:pw@host/a and sqlite:///x", "to https://host/a and sqlite:///x"),
        ("postgresql://u:a/b@c@host/db", "postgresql://host/db"),
        ("postgresql://host/db?user=u&password=pw", "postgresql://host/db"),
        ("postgresql://host/db?user=u&password=p@w", "postgresql://..."),
        ("postgresql://u:a?b@host/db is down", "postgresql://... is down"),
    ],
)
def test_passwords_of_addresses_are_not_shown(text, shown):
    assert without_password(text) == shown
