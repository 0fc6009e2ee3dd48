"""Several inputs and padded batches in real jobs: the same curve at any number of workers."""

import input_tasks
import numpy as np
import pytest
from support import pool
from support.jobs import FRAMEWORKS, Run, temporary_folder

TASKS = input_tasks.__file__
TOLERANCE = 1e-4  # relative, per step
runs: dict[tuple, Run] = {}


def trained(task: str, framework: str, controller: str = "none", workers: int = 1, *options: str) -> Run:
    """Train once per set of options."""
    key = (task, framework, controller, workers, *options)
    if key not in runs:
        words = ["--task", f"{TASKS}:{task}", "--framework", framework, *options]
        runs[key] = pool.train(workers, controller, *words, cwd=temporary_folder())
    return runs[key]


def assert_equal(one: Run, other: Run) -> None:
    """Compare all losses and metrics, of training and of evaluations."""
    names = {"loss", "mae", "accuracy"}
    rows = [
        [[line[name] for name in sorted(names & line.keys())] for line in run.metrics] for run in (one, other)
    ]
    assert len(rows[0]) == len(rows[1]) > 8
    np.testing.assert_allclose(*rows, rtol=TOLERANCE)


@pytest.mark.parametrize(
    ("framework", "controller", "workers", "task"),
    [("torch", "mpi", 3, "TwoInputs"), ("tf", "mpi", 2, "Padded")],
)
def test_the_curve_does_not_depend_on_the_number_of_workers(task, controller, workers, framework):
    assert_equal(trained(task, framework, controller, workers), trained(task, framework))


@pytest.mark.parametrize("framework", ["torch"])
def test_neither_accumulation_nor_reader_processes_change_the_curve(framework):
    options = ("--accumulate", "2", "--read-workers", "1")
    assert_equal(trained("Padded", framework, "mpi", 2, *options), trained("Padded", framework))


@pytest.mark.parametrize("task", ["TwoInputs", "Padded"])
def test_both_frameworks_draw_the_same_curve(task):
    assert_equal(*(trained(task, framework) for framework in FRAMEWORKS))


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_inputs_by_position_are_those_by_name(framework):
    of_tuple, of_mapping = (trained(task, framework) for task in ("TupleInputs", "TwoInputs"))
    np.testing.assert_allclose(of_tuple.losses, of_mapping.losses, rtol=TOLERANCE)
