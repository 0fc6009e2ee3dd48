"""Synchronised batch norm: the plain layer's gradients, and one curve at any number of workers."""

from pathlib import Path

import numpy as np
import pytest
from support.pool import run_suite, shared_run

HERE = Path(__file__).parent
SUITE = HERE / "suite_batch_norm.py"
# two workers divide the batch evenly, four do not; each step is logged
OPTIONS = ("--task", f"{HERE / 'batch_norm_task.py'}:Normed", "--global-batch-size", "10")
TOLERANCE = 1e-4  # relative, per step: the design's promise
CONTROLLERS = {("torch", 2): "gloo", ("torch", 4): "mpi", ("tf", 2): "mpi", ("tf", 4): "gloo"}


def trained(framework, workers, *options):
    controller = CONTROLLERS.get((framework, workers), "none")
    return shared_run(workers, controller, *OPTIONS, "--framework", framework, *options)


def difference(found, expected):
    assert len(found) == len(expected)
    return float(np.max(np.abs(np.asarray(found) / np.asarray(expected) - 1)))


@pytest.mark.parametrize(("framework", "workers", "controller"), [("torch", 3, "mpi"), ("tf", 2, "mpi")])
def test_it_is_the_plain_layer_on_the_whole_batch(framework, workers, controller, tmp_path):
    run_suite(SUITE, workers, controller, framework, cwd=tmp_path, timeout=500)


@pytest.mark.parametrize(("framework", "workers"), [("torch", 4), ("tf", 1), ("tf", 2)])
def test_the_curve_depends_on_neither_workers_nor_framework(framework, workers):
    expected, found = (trained(*which, "--sync-batch-norm") for which in (("torch", 1), (framework, workers)))
    assert len(found.losses) == 40
    assert difference(found.losses, expected.losses) < TOLERANCE
    # of the moving statistics
    assert difference([found.metrics[-1]["loss"]], [expected.metrics[-1]["loss"]]) < TOLERANCE
