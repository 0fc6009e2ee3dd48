"""Runs the contract suite for every framework, over both controllers, with 1, 2 and 3 workers."""

from pathlib import Path

import pytest
from support.jobs import FRAMEWORKS
from support.pool import run_suite

SUITE = Path(__file__).with_name("suite_backend.py")
REDUCTION = Path(__file__).with_name("suite_reduction.py")


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("workers", "controller"), [(1, "none"), (2, "mpi"), (2, "gloo"), (3, "mpi")])
def test_backend_keeps_the_contract(framework, workers, controller, tmp_path):
    run_suite(SUITE, workers, controller, framework, cwd=tmp_path, timeout=240)


@pytest.mark.parametrize("framework", FRAMEWORKS)
@pytest.mark.parametrize(("workers", "controller"), [(1, "none"), (2, "mpi")])
def test_reducers_keep_the_contract(framework, workers, controller, tmp_path):
    run_suite(REDUCTION, workers, controller, framework, cwd=tmp_path, timeout=240)
