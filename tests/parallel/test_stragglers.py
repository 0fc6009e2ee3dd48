"""A slow worker is named, and what the others wait for it is right, wherever it spends its time."""

import statistics
from pathlib import Path

import pytest
import straggler_tasks
from support import pool
from support.jobs import Run, temporary_folder

TRIES = 4  # other processes may keep the cores from one of the workers
OPTIONS = ("--batch-size", "4", "--log-every", "10", "--eval-every", "null", "--set", "read_threads=1")


def made(framework: str, controller: str, task: str, folder: Path, workers: int = 2, *options: str) -> Run:
    words = ["--framework", framework, "--task", f"{straggler_tasks.__file__}:{task}", *OPTIONS, *options]
    return pool.train(workers, controller, *words, cwd=folder)


def mistakes(run: Run, task: str) -> list[str]:
    """Return what a run says wrong of its slow worker, and of what the other one waits."""
    windows = [line for line in run.metrics if line["phase"] == "train"][1:]  # without compiling
    if task == "SlowLoss":  # the fast one of two workers waits while the slow one sleeps, in each step
        expected = [0.5 * straggler_tasks.SLOW_SECONDS * line["samples_per_second"] / 8 for line in windows]
    else:  # reading ahead hides a part of the slow reading
        expected = [line["data_wait_fraction"] for line in windows]
    found = [line["wait_fraction"] for line in windows]
    slowest = [line["slowest_rank"] for line in windows]
    checks = {
        f"slowest: {slowest}": slowest == 3 * [straggler_tasks.SLOW_RANK],
        f"waited: {found}, not {expected}": statistics.median(found)
        == pytest.approx(statistics.median(expected), rel=0.2),
        f"said: {run.result.output}": run.result.output.count("rank 1 is slower than the others") == 1,
    }
    return [text for text, is_right in checks.items() if not is_right]


@pytest.mark.parametrize(
    ("framework", "controller", "task"),
    [("torch", "mpi", "SlowLoss"), ("tf", "gloo", "SlowLoss")],
)
def test_a_slow_worker_is_named_and_waiting_measured(framework, controller, task):
    for _ in range(TRIES):
        run = made(framework, controller, task, temporary_folder(), 2, "--steps", "40")
        found = mistakes(run, task)
        if not found:
            break
    assert found == []
