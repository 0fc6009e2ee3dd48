"""Training that went wrong is never reported as right: losses that are no numbers, replicas that drift."""

import json

import numpy as np
from endings import HOST, Ending, end_of

from hvdtrain.checkpoints.storage import checkpoints_in, step_of, verify
from hvdtrain.data.order import ShuffledOrder


def step_of_sample(index: int) -> int:
    """Give the step, from 1, whose global batch of 8 holds a sample."""
    order = ShuffledOrder(64, 0).indices(np.arange(64)).tolist()
    return order.index(index) // 8 + 1


def check(ending: Ending) -> None:
    """Check that a job failed in training, and that one message says so."""
    assert ending.returncode == 4
    assert ending.summary["status"] == "failed"
    assert ending.output.count("hvdtrain: ") == 1
    assert "Traceback" not in ending.output


def test_a_loss_that_is_nan_stops_the_run_at_that_step(tmp_path):
    ending = end_of(2, "mpi", "NotANumber", "--framework", "tf", cwd=tmp_path)
    check(ending)
    said = f"the loss is nan at step {step_of_sample(17)}, with learning rate 0.02"
    assert ending.output.count(said) == 1
    lines = (ending.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, step_of_sample(17)))
    assert "the loss is nan" in ending.summary["error"]


def test_parameters_that_are_not_finite_take_no_good_checkpoints_place(tmp_path):
    """It saves after each step, so that the state is saved before the next loss shows it."""
    options = ("--framework", "torch", "--save-every", "1", "--keep-last", "1")
    ending = end_of(2, "gloo", "GradientNotANumber", *options, cwd=tmp_path)
    check(ending)
    (checkpoint,) = checkpoints_in(ending.folder / "run" / "checkpoints")
    assert step_of(checkpoint) == step_of_sample(17) - 1
    assert all(np.isfinite(array).all() for array in verify(checkpoint).read().values())


def test_drift_ends_the_job_at_the_next_check_and_names_rank_and_parameter(tmp_path):
    options = ("--framework", "torch", "--set", "check_replicas_every=5")
    ending = end_of(3, "mpi", "Drifts", *options, cwd=tmp_path)
    check(ending)
    said = f"the workers' parameters differ: rank 1 ({HOST}) drifted from the others, first in model/"
    assert ending.output.count(said) == 1
    assert "bias" in ending.output.split(said)[1].splitlines()[0]
    assert ending.summary["steps"] == 5
