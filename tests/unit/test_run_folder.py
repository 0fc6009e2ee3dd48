"""A run directory that is removed, moved or replaced while a job trains."""

import json
import shutil
import time
from types import SimpleNamespace

import pytest

from hvdtrain.checkpoints.storage import checkpoints_in
from hvdtrain.errors import EnvironmentFault
from hvdtrain.reporting.report import RunFolder


def test_a_directory_that_was_moved_is_followed_if_another_has_its_name(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").touch()
    folder = RunFolder(tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "b").touch()
    assert folder.check() == tmp_path / "moved"
    assert folder.replaced
    shutil.rmtree(tmp_path / "moved")
    assert folder.check() is None
    folder.close()


def stopped_by(train, happen):
    """Train; after step 12, let something happen that stops training."""
    callback = SimpleNamespace(on_step=lambda step, _: happen() if step.step == 12 else None)
    with pytest.raises(EnvironmentFault, match="training stop"):
        train(callbacks=[callback], steps=20, log_every=2, save_every=5, keep_last=None)


def test_a_job_whose_run_directory_is_removed_ends(train, tmp_path):
    def remove():
        (tmp_path / "run").rename(tmp_path / "removed")  # at once, while the saver may be writing
        shutil.rmtree(tmp_path / "removed", ignore_errors=True)

    stopped_by(train, remove)
    assert not (tmp_path / "run").exists()


def test_a_directory_that_replaces_the_run_directory_is_not_written_to(train, tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"

    def replace():
        while not (run / "checkpoints" / "step-00000010").exists():  # nothing is being written
            time.sleep(0.01)
        run.rename(moved)
        run.mkdir()
        (run / "metrics.jsonl").write_text("another job's\n")

    stopped_by(train, replace)
    assert [path.name for path in run.iterdir()] == ["metrics.jsonl"]
    assert (run / "metrics.jsonl").read_text() == "another job's\n"
    newest = checkpoints_in(moved / "checkpoints")[-1]
    summary = json.loads((moved / "summary.json").read_text())
    assert (summary["status"], summary["checkpoint"]) == ("failed", str(newest))
    assert newest.name > "step-00000012"  # it stopped soon, and saved where the directory went
