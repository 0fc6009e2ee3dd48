"""Regularizers and other losses of Keras models: part of the loss, once per step."""

from pathlib import Path

import pytest
from support.pool import run_suite, shared_run

HERE = Path(__file__).parent
TASK = f"{HERE / 'added_losses_task.py'}:"


def trained(framework, workers, *options, task="Regularized"):
    controller = "none" if workers == 1 else "mpi"
    return shared_run(workers, controller, "--framework", framework, "--task", TASK + task, *options)


def curve(run):
    return [line[name] for line in run.metrics for name in ("loss", "regularization_loss")]


def test_they_join_the_objective_of_one_worker(tmp_path):
    run_suite(HERE / "suite_added_losses.py", 1, "none", "tf", cwd=tmp_path, timeout=500)


@pytest.mark.parametrize(("workers", "options"), [(2, ("--accumulate", "2"))])
def test_the_curve_does_not_depend_on_the_workers_and_is_that_of_the_objective_by_hand(workers, options):
    expected, found = curve(trained("torch", 1)), curve(trained("tf", workers, *options))
    assert len(found) == 2 * 9
    assert found == pytest.approx(expected, rel=1e-4)


def test_methods_for_another_trainer_are_noted():
    run = trained("torch", 1, task="Lightning")
    assert "training_step and configure_optimizers of the model (of PyTorch Lightning)" in run.result.output
    assert curve(run) == curve(trained("torch", 1))
