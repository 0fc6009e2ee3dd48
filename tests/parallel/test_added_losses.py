"""Regularizers and other losses of Keras models, at one worker; the zoo has them at two."""

from pathlib import Path

from support.pool import run_suite


def test_they_join_the_objective_of_one_worker(tmp_path):
    suite = Path(__file__).with_name("suite_added_losses.py")
    run_suite(suite, 1, "none", "tf", cwd=tmp_path, timeout=500)
