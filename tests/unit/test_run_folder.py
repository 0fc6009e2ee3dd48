"""A run directory that is removed, moved or replaced while a job trains."""

import json
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from hvdtrain.checkpoints import saver
from hvdtrain.checkpoints.storage import checkpoints_in
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting.lock_state import LOCK_FILE
from hvdtrain.reporting.report import RunFolder
from hvdtrain.reporting.reporters import JsonlLog


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    (path / "a").touch()
    opened = RunFolder(path)
    yield opened
    opened.close()


def test_a_directory_that_was_removed_is_made_anew_and_said_once(tmp_path):
    made = []
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run", made.append)
    shutil.rmtree(tmp_path / "run")
    assert folder.check() == folder.check() == tmp_path / "run"
    assert (tmp_path / "run").is_dir()
    assert made == [tmp_path / "run"]
    assert len(folder.take_notes()) == 1
    assert folder.take_notes() == []
    folder.close()


def test_what_another_thread_writes_into_it_at_once_is_no_other_directory(folder, tmp_path, monkeypatch):
    mkdir = Path.mkdir

    def made(path, *args, **options):
        mkdir(path, *args, **options)
        (path / "checkpoints").touch()

    shutil.rmtree(tmp_path / "run")
    monkeypatch.setattr(Path, "mkdir", made)
    assert folder.check() == tmp_path / "run"
    assert folder.replaced == ""


def test_a_log_whose_directory_is_removed_after_the_look_at_it_is_restored(tmp_path):
    notes = []
    (tmp_path / "run").mkdir()
    folder = RunFolder(tmp_path / "run")
    log = JsonlLog(tmp_path / "run" / "metrics.jsonl", notes.append, folder)
    check = folder.check

    def late():
        folder.check = check
        found = check()
        shutil.rmtree(tmp_path / "run")
        return found

    log.append({"step": 1})
    folder.check = late
    log.append({"step": 2})
    log.close()
    folder.close()
    assert (tmp_path / "run" / "metrics.jsonl").read_text().count("step") == 2
    assert not [note for note in notes if note.startswith("cannot write")]


def test_a_directory_that_was_moved_is_followed_if_another_has_its_name(folder, tmp_path):
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "b").touch()
    assert folder.check() == tmp_path / "moved"
    assert "was replaced by another one" in folder.replaced
    shutil.rmtree(tmp_path / "moved")
    assert folder.check() is None


def at_step(number, happen):
    """Let something happen after a step."""
    return SimpleNamespace(on_step=lambda step, _: happen() if step.step == number else None)


OPTIONS = {"steps": 20, "log_every": 2, "save_every": 5, "keep_last": None}


def test_a_run_directory_that_is_removed_is_made_anew_with_all_that_was_logged(train, tmp_path, capsys):
    run = tmp_path / "run"

    def remove():
        run.rename(tmp_path / "removed")  # at once, while the saver may be writing
        shutil.rmtree(tmp_path / "removed", ignore_errors=True)

    summary = train(callbacks=[at_step(12, remove)], **OPTIONS)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["phase"] == "train"] == list(range(2, 21, 2))
    assert "steps: 20" in (run / "config.yaml").read_text()
    assert json.loads((run / "summary.json").read_text())["status"] == summary.status == "completed"
    assert checkpoints_in(run / "checkpoints")[-1].name == "step-00000020"
    assert (run / LOCK_FILE).stat().st_size > 0
    assert capsys.readouterr().out.count("was removed while training; it is made anew, without") == 1


def test_a_run_directory_that_is_removed_just_before_a_checkpoint_is_written(
    train, tmp_path, monkeypatch, capsys
):
    write, run = saver.storage.write, tmp_path / "run"

    def late(*args):
        monkeypatch.setattr(saver.storage, "write", write)
        run.rename(tmp_path / "removed")
        return write(*args)

    monkeypatch.setattr(saver.storage, "write", late)
    summary = train(**OPTIONS)
    assert summary.status == "completed"
    assert len(checkpoints_in(run / "checkpoints")) == 4
    output = capsys.readouterr().out
    assert "was removed while training; it is made anew, without" in output
    assert "cannot write" not in output


def test_a_directory_that_replaces_the_run_directory_is_not_written_to(train, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"

    def replace():
        while not (run / "checkpoints" / "step-00000010").exists():  # nothing is being written
            time.sleep(0.01)
        run.rename(moved)
        run.mkdir()
        (run / "metrics.jsonl").write_text("another job's\n")

    with pytest.raises(EnvironmentFault, match=r"was replaced by another one while training; training stop"):
        train(callbacks=[at_step(12, replace)], **OPTIONS)
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    assert (run / "metrics.jsonl").read_text() == "another job's\n"
    newest = checkpoints_in(moved / "checkpoints")[-1]
    summary = json.loads((moved / "summary.json").read_text())
    assert (summary["status"], summary["checkpoint"]) == ("failed", str(newest))
    assert newest.name > "step-00000012"  # it stopped soon, and saved where the directory went
