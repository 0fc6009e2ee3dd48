"""Whole jobs with local steps: equal in both frameworks, resumed bit by bit, and anywhere."""

import functools
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from support.jobs import Run, temporary_folder
from support.pool import train
from support.resuming import TASKS, logged, said

STEPS, HALF = 12, 6
OPTIONS = (
    *("--task", f"{TASKS}:Fit", "--batch-size", "4", "--learning-rate", "0.01", "--optimizer", "adamw"),
    *("--sync-every", "3", "--outer-optimizer", "nesterov", "--log-every", "3", "--eval-every", "6"),
    *("--save-every", "3", "--set", "keep_last=null", "--steps", str(STEPS)),
)
OUTER = "optimizer/outer_momentum/"


@functools.cache
def trained(framework: str, workers: int, controller: str, *options: str) -> Run:
    arguments = ("--framework", framework, *OPTIONS, *options)
    return train(workers, controller, *arguments, cwd=temporary_folder())


def checkpoint(run: Run, step: int) -> Path:
    return run.folder / "checkpoints" / f"step-{step:08d}"


def test_both_frameworks_have_the_same_curve_over_both_controllers():
    torch, tf = trained("torch", 2, "mpi"), trained("tf", 2, "gloo")
    assert len(torch.losses) == STEPS // 3
    np.testing.assert_allclose(tf.losses, torch.losses, rtol=1e-4)
    found, expected = (load_file(checkpoint(run, STEPS) / "optimizer.safetensors") for run in (tf, torch))
    assert found.keys() == expected.keys()
    assert any(name.startswith(OUTER) for name in found)
    assert "the result depends on the number of workers" in said(torch)


def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit():
    """In TensorFlow; suite_local_steps.py has a state of each framework that goes on."""
    whole = trained("tf", 2, "gloo")
    resumed = trained("tf", 2, "gloo", "--resume", str(checkpoint(whole, HALF)))
    assert logged(resumed) == [line for line in logged(whole) if line["step"] > HALF]
    for name in ("model.safetensors", "optimizer.safetensors"):
        found, expected = (checkpoint(run, STEPS) / name for run in (resumed, whole))
        assert found.read_bytes() == expected.read_bytes()


def test_another_framework_with_another_number_of_workers_goes_on():
    whole = trained("torch", 2, "mpi")
    resumed = trained("tf", 1, "none", "--resume", str(checkpoint(whole, HALF)))
    assert "the result depends on the number of workers, which was 2 and is 1" in said(resumed)
    assert resumed.losses[-1] < whole.losses[0]
