"""A scheduler asks a job to stop or to save: it stops in order, and goes on later where it stopped."""

import json
import os
import signal
from pathlib import Path

import pytest
from endings import SOON_SECONDS, Ending, command_for, disturbed, run_to_end, signalled, slow, steps_logged
from support.jobs import FRAMEWORKS, started
from support.pool import command, controller_of

RARELY = ("--save-every", "1000")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


def assert_stopped_in_order(ending: Ending, returncode: int = 75) -> int:
    """Check what a job left that stopped on request; give the step where it stopped."""
    assert ending.returncode == returncode, ending.output
    assert ending.summary["status"] == "stopped"
    step = ending.summary["steps"]
    assert step >= 3
    assert ending.summary["checkpoint"] == f"run/checkpoints/step-{step:08d}"
    assert checkpoints(ending.folder)[-1] == f"step-{step:08d}"
    assert ending.seconds < SOON_SECONDS
    return step


def test_sigusr1_saves_and_sigterm_stops_with_75_and_the_same_command_goes_on(tmp_path):
    """In TensorFlow; the others signal launchers, which know no framework."""

    def save_and_stop(job: started) -> None:
        os.kill(job.process.pid, signal.SIGUSR1)
        job.until(lambda: checkpoints(tmp_path))
        steps = steps_logged(tmp_path)
        job.until(lambda: steps_logged(tmp_path) >= steps + 3)
        os.kill(job.process.pid, signal.SIGTERM)

    words = slow("tf", "gloo", *RARELY)
    ending = disturbed(words, tmp_path, save_and_stop)
    step = assert_stopped_in_order(ending)
    saved = checkpoints(tmp_path)
    assert len(saved) == 2
    assert int(saved[0].removeprefix("step-")) + 3 <= step
    for sign in ("Traceback", "leaked", "first to fail", "after failure", "bug in hvdtrain"):
        assert sign not in ending.output, "it does not look like a crash"
    assert "horovodrun: the workers stopped on request" in ending.output

    again = (*words[words.index("hvdtrain") + 1 :], "--steps", str(step + 3), "--resume")
    result = command(2, "gloo", "tf", *again, cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == step + 3
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [line["step"] for line in lines if line["phase"] == "train"] == list(range(1, step + 4))


def test_one_worker_that_is_asked_stops_all_of_them(tmp_path):
    assert_stopped_in_order(signalled(slow("torch", "gloo", *RARELY), tmp_path, signal.SIGTERM, rank=1))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_max_time_stops_all_workers_at_a_step_and_the_run_can_be_resumed(framework, tmp_path):
    words = ("train", "--framework", framework, "--run-dir", str(tmp_path / "run"), "--epochs", "9999")
    for steps, options in enumerate((("--max-time", "1"), ("--resume", "--set", "max_time=0.5s"))):
        done = command(2, controller_of(framework, 2), *words, *options, cwd=tmp_path)
        assert done.returncode == 75
        assert "max_time is over" in done.output
        summary = json.loads((tmp_path / "run" / "summary.json").read_text())
        assert (summary["status"], summary["steps"] > steps) == ("stopped", True)
        assert checkpoints(tmp_path)[-1] == f"step-{summary['steps']:08d}"


@pytest.mark.parametrize("controller", ["mpirun", "mpi"], ids="torch-{}".format)
def test_sigusr2_to_a_launcher_stops_in_order(controller, tmp_path):
    assert_stopped_in_order(signalled(slow("torch", controller, *RARELY), tmp_path, signal.SIGUSR2))


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_launcher_that_is_killed_leaves_no_worker(controller, tmp_path):
    assert signalled(slow("torch", controller), tmp_path, signal.SIGKILL).seconds < SOON_SECONDS


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_when_torchrun_is_stopped_or_killed_its_workers_save_and_end(number, tmp_path):
    ending = signalled(slow("torch", "torchrun"), tmp_path, number)
    assert_stopped_in_order(ending, returncode=1 if number == signal.SIGTERM else -signal.SIGKILL)
    assert number == signal.SIGKILL or ending.output.count("SIGTERM came at step") == 1


def test_torchrun_refuses_tensorflow_with_the_launcher_that_starts_it(tmp_path):
    ending = run_to_end(command_for(2, "torchrun", "Sound", "--framework", "tf"), tmp_path)
    assert ending.returncode == 1
    assert ending.output.count("hvdtrain: rank ") == 1
    assert "torchrun starts workers of PyTorch alone" in ending.output
    assert "horovodrun -np 2" in ending.output
