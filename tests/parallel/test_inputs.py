"""Samples of unequal lengths, padded by batch: one curve at any number of workers and in both frameworks."""

import functools

import input_tasks
import numpy as np
import pytest
from support import pool
from support.jobs import Run, temporary_folder

TOLERANCE = 1e-4  # relative, per step


@functools.cache
def trained(framework: str, workers: int, *options: str) -> Run:
    words = ["--task", f"{input_tasks.__file__}:Padded", "--framework", framework, *options]
    return pool.train(workers, pool.controller_of(framework, workers), *words, cwd=temporary_folder())


@pytest.mark.parametrize(
    ("framework", "workers", "options"),
    [("tf", 1, ()), ("tf", 2, ()), ("torch", 2, ("--accumulate", "2", "--read-workers", "1"))],
)
def test_the_curve_is_that_of_one_worker_in_pytorch(framework, workers, options):
    """Losses and metrics, of training and of evaluations."""
    rows = [
        [[line[name] for name in ("loss", "accuracy")] for line in run.metrics]
        for run in (trained(framework, workers, *options), trained("torch", 1))
    ]
    assert len(rows[0]) == len(rows[1]) > 8
    np.testing.assert_allclose(*rows, rtol=TOLERANCE)
