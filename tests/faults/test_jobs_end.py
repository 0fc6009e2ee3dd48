"""How whole jobs end: with threads left behind, sys.exit(), a full or slow disk, another run directory."""

import json
from pathlib import Path

import pytest
from endings import SOON_SECONDS, command_for, disturbed, end_of, run_to_end, slow, steps_logged
from support.jobs import started

ALONE = command_for(1, "none", "Sound", "--framework", "torch")


def test_a_thread_that_a_task_leaves_does_not_keep_a_completed_job(tmp_path):
    ending = end_of(2, "gloo", "LeavesThread", "--framework", "torch", cwd=tmp_path)
    assert (ending.returncode, ending.summary["status"]) == (0, "completed")
    assert "rank 1: the job is done; 10 s later this process ends despite a thread" in ending.output
    assert "still running: left behind." in ending.output


def test_sys_exit_on_one_worker_fails_the_job_with_a_message(tmp_path):
    ending = end_of(2, "gloo", "Exits", "--framework", "tf", cwd=tmp_path)
    assert ending.returncode == 4
    assert ending.output.count("hvdtrain: rank 1 on ") == 1
    assert "SystemExit: 0" in ending.output
    assert ending.summary["status"] == "failed"
    assert "SystemExit: 0" in ending.summary["error"]


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_worker_that_is_killed_while_gradients_travel_ends_the_job(controller, tmp_path):
    ending = end_of(2, controller, "KilledWhileSending", "--framework", "torch", cwd=tmp_path)
    assert ending.returncode not in (0, None)
    assert "in 2 parts during the backward pass" in ending.output
    assert 2 < steps_logged(tmp_path) < 9
    assert ending.seconds_since_failure() < SOON_SECONDS


@pytest.mark.parametrize("files", ["> /dev/full", "<&- >&- 2>&-"], ids=["on a full disk", "closed"])
def test_a_full_or_missing_standard_output_does_not_end_a_job(files, tmp_path):
    ending = run_to_end(["sh", "-c", " ".join([*ALONE, files])], tmp_path)
    assert (ending.returncode, ending.summary["status"]) == (0, "completed")
    assert steps_logged(tmp_path) == 20
    said = "cannot write to standard output: No space left on device; the job"
    assert ending.output.count(said) == (files == "> /dev/full")


# Over MPI, a collective that waits longer than this ends the job.
STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "5", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "12"}


def test_a_last_save_that_takes_longer_than_the_stall_limit_is_waited_for(tmp_path):
    slow_save = command_for(2, "mpi", "SavesSlowly", "--framework", "torch", "--set", "save_every=null")
    ending = run_to_end(slow_save, tmp_path, **STALL)
    assert (ending.returncode, ending.summary["status"]) == (0, "completed")
    assert "until the checkpoint of step 20 was written" in ending.output


def test_a_run_directory_that_is_replaced_ends_the_job_and_is_not_written_to(tmp_path):
    run, moved = tmp_path / "run", tmp_path / "moved"

    def replace(_: started) -> None:
        run.rename(moved)
        run.mkdir()
        (run / "other").touch()

    ending = disturbed(slow("tf", "gloo"), tmp_path, replace, steps=6)
    assert ending.returncode == 3
    assert ending.output.count("replaced by another one while training; training stopped at step") == 1
    assert [path.name for path in run.iterdir()] == ["other"]
    summary = json.loads((moved / "summary.json").read_text())
    assert summary["status"] == "failed"
    assert Path(summary["checkpoint"]).parent == moved / "checkpoints"
    assert f"--run-dir {moved}" in ending.output
