"""A scheduler asks a job to stop or to save: it stops in order, and goes on later where it stopped."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from endings import SOON_SECONDS, Ending, command_for, ended, steps_logged, wait_until
from support import pool
from support.jobs import FRAMEWORKS, started
from support.pool import command, controller_of


def slow(framework: str, controller: str) -> list[str]:
    workers = 1 if controller == "none" else 2
    return command_for(workers, controller, "Slow", "--framework", framework, "--save-every", "1000")


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


def trains_on(folder: Path) -> None:
    """Wait until a job has done some more steps."""
    before = steps_logged(folder)
    wait_until(lambda: steps_logged(folder) >= before + 3)


def asked_to_stop(command: list[str], folder: Path, number: int, rank: int | None = None):
    """Signal a job, or one worker of it, while it trains; give its ending and the seconds it took."""
    with started(command, folder) as job:
        trains_on(folder)
        begun = time.time()
        os.kill(job.process.pid if rank is None else int((folder / f"pid-{rank}").read_text()), number)
        ending = ended(job, folder)
    return ending, ending.ended - begun


def assert_stopped_in_order(ending: Ending) -> int:
    """Check what a job left that stopped on request; give the step where it stopped."""
    assert ending.returncode == 75, ending.output
    assert ending.summary["status"] == "stopped"
    step = ending.summary["steps"]
    assert step >= 3
    newest = checkpoints(ending.folder)[-1]
    assert int(newest.removeprefix("step-")) == step
    assert ending.summary["checkpoint"].endswith(newest)
    return step


def test_sigusr1_saves_and_sigterm_stops_with_75_and_the_same_command_goes_on(tmp_path):
    """In TensorFlow; the others signal launchers, which know no framework."""
    command = slow("tf", "gloo")
    with started(command, tmp_path) as job:
        trains_on(tmp_path)
        os.kill(job.process.pid, signal.SIGUSR1)
        wait_until(lambda: checkpoints(tmp_path))
        trains_on(tmp_path)
        begun = time.time()
        os.kill(job.process.pid, signal.SIGTERM)
        ending = ended(job, tmp_path)
    assert ending.ended - begun < SOON_SECONDS
    step = assert_stopped_in_order(ending)
    saved = checkpoints(tmp_path)
    assert len(saved) == 2
    assert int(saved[0].removeprefix("step-")) + 3 <= step
    for sign in ("Traceback", "leaked", "first to fail", "after failure", "bug in hvdtrain"):
        assert sign not in ending.output, "it does not look like a crash"
    assert "horovodrun: the workers stopped on request" in ending.output

    words = command[command.index("hvdtrain") + 1 :]
    result = pool.command(2, "gloo", "tf", *words, "--steps", str(step + 3), "--resume", cwd=tmp_path)
    assert result.returncode == 0, result.output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == step + 3
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    steps = [manifest["step"] for manifest in map(json.loads, lines) if manifest["phase"] == "train"]
    assert steps == list(range(1, step + 4))


def test_one_worker_that_is_asked_stops_all_of_them(tmp_path):
    ending, seconds = asked_to_stop(slow("torch", "gloo"), tmp_path, signal.SIGTERM, rank=1)
    assert_stopped_in_order(ending)
    assert seconds < SOON_SECONDS


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
    ending, seconds = asked_to_stop(slow("torch", controller), tmp_path, signal.SIGUSR2)
    assert_stopped_in_order(ending)
    assert seconds < SOON_SECONDS


@pytest.mark.parametrize("controller", ["mpi", "gloo"])
def test_a_launcher_that_is_killed_leaves_no_worker(controller, tmp_path):
    _, seconds = asked_to_stop(slow("torch", controller), tmp_path, signal.SIGKILL)
    assert seconds < SOON_SECONDS
