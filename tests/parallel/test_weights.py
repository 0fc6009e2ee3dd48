"""Ignored targets, weights of samples, targets and classes, and means of batches: at any worker count."""

from pathlib import Path

import pytest
from support.pool import run_suite

SUITE = Path(__file__).with_name("suite_weights.py")


@pytest.mark.parametrize(("framework", "workers", "controller"), [("torch", 2, "mpi"), ("tf", 2, "gloo")])
def test_the_mean_is_over_what_counts(framework, workers, controller, tmp_path):
    run_suite(SUITE, workers, controller, framework, cwd=tmp_path, timeout=500)
