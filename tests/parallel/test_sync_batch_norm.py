"""Synchronised batch norm: the plain layer's gradients. Its curves are those of the zoo (norms.py)."""

from pathlib import Path

import pytest
from support.pool import run_suite

SUITE = Path(__file__).with_name("suite_batch_norm.py")


@pytest.mark.parametrize(("framework", "workers", "controller"), [("torch", 2, "mpi"), ("tf", 2, "gloo")])
def test_it_is_the_plain_layer_on_the_whole_batch(framework, workers, controller, tmp_path):
    run_suite(SUITE, workers, controller, framework, cwd=tmp_path, timeout=500)
