"""A slow worker is named, and what the others wait for it is right."""

import statistics

import pytest
import straggler_tasks
from support import pool
from support.jobs import Run, temporary_folder

TRIES = 4  # other processes may keep the cores from one of the workers
OPTIONS = ("--batch-size", "4", "--log-every", "10", "--eval-every", "null", "--steps", "40")


def mistakes(run: Run) -> list[str]:
    """Return what a run says wrong of its slow worker, and of what the other one waits."""
    windows = [line for line in run.metrics if line["phase"] == "train"][1:]  # without compiling
    # the fast one of two workers waits while the slow one sleeps, in each step
    expected = [0.5 * straggler_tasks.SLOW_SECONDS * line["samples_per_second"] / 8 for line in windows]
    found = [line["wait_fraction"] for line in windows]
    slowest = [line["slowest_rank"] for line in windows]
    checks = {
        f"slowest: {slowest}": slowest == 3 * [straggler_tasks.SLOW_RANK],
        f"waited: {found}, not {expected}": statistics.median(found)
        == pytest.approx(statistics.median(expected), rel=0.2),
        f"said: {run.result.output}": run.result.output.count("rank 1 is slower than the others") == 1,
    }
    return [text for text, is_right in checks.items() if not is_right]


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi"), ("tf", "gloo")])
def test_a_slow_worker_is_named_and_waiting_measured(framework, controller):
    words = ["--framework", framework, "--task", f"{straggler_tasks.__file__}:SlowLoss", *OPTIONS]
    for _ in range(TRIES):
        found = mistakes(pool.train(2, controller, *words, cwd=temporary_folder()))
        if not found:
            break
    assert found == []
