"""Training that went wrong is never reported as right: losses that are no numbers, replicas that drift."""

import json
import socket

import numpy as np
import pytest
from endings import Ending, end_of

from hvdtrain.checkpoints.storage import checkpoints_in, step_of
from hvdtrain.checkpoints.verification import verify
from hvdtrain.data.order import ShuffledOrder

HOST = socket.gethostname()


@pytest.fixture(scope="module", params=["tf"])
def not_a_number(request, tmp_path_factory) -> Ending:
    options = ("--framework", request.param)
    return end_of(2, "mpi", "NotANumber", *options, cwd=tmp_path_factory.mktemp("job"))


def step_of_sample(index: int) -> int:
    """Give the step, from 1, whose global batch of 8 holds a sample."""
    order = ShuffledOrder(64, 0).indices(np.arange(64)).tolist()
    return order.index(index) // 8 + 1


def test_nan_ends_the_job_with_its_exit_code(not_a_number):
    assert not_a_number.returncode == 4


def test_nan_is_said_once_with_step_and_learning_rate(not_a_number):
    said = f"the loss is nan at step {step_of_sample(17)}, with learning rate 0.02"
    assert not_a_number.output.count(said) == 1
    assert not_a_number.output.count("hvdtrain: ") == 1
    assert "Traceback" not in not_a_number.output


def test_nan_stops_the_run_at_that_step(not_a_number):
    lines = (not_a_number.folder / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == list(range(1, step_of_sample(17)))
    summary = not_a_number.summary
    assert summary["status"] == "failed"
    assert "the loss is nan" in summary["error"]


@pytest.fixture(scope="module", params=["torch"])
def gradient_not_a_number(request, tmp_path_factory) -> Ending:
    """Save after each step, so that the state is saved before the next loss shows it."""
    options = ("--framework", request.param, "--save-every", "1", "--keep-last", "1")
    return end_of(2, "gloo", "GradientNotANumber", *options, cwd=tmp_path_factory.mktemp("job"))


def test_parameters_that_are_not_finite_end_the_job_with_its_exit_code(gradient_not_a_number):
    assert gradient_not_a_number.returncode == 4
    assert gradient_not_a_number.summary["status"] == "failed"


def test_parameters_that_are_not_finite_take_no_good_checkpoints_place(gradient_not_a_number):
    (checkpoint,) = checkpoints_in(gradient_not_a_number.folder / "run" / "checkpoints")
    assert step_of(checkpoint) == step_of_sample(17) - 1
    assert all(np.isfinite(array).all() for array in verify(checkpoint).read().values())


def test_parameters_that_are_not_finite_are_said_once(gradient_not_a_number):
    said = gradient_not_a_number.output
    assert said.count("hvdtrain: ") == 1
    assert "Traceback" not in said


@pytest.fixture(scope="module")
def drifted(tmp_path_factory) -> Ending:
    options = ("--framework", "torch", "--set", "check_replicas_every=5")
    return end_of(3, "mpi", "Drifts", *options, cwd=tmp_path_factory.mktemp("job"))


def test_drift_ends_the_job_with_its_exit_code(drifted):
    assert drifted.returncode == 4


def test_drift_is_said_once_with_rank_and_parameter(drifted):
    said = f"the workers' parameters differ: rank 1 ({HOST}) drifted from the others, first in model/"
    assert drifted.output.count(said) == 1
    assert "bias" in drifted.output.split(said)[1].splitlines()[0]
    assert "Traceback" not in drifted.output


def test_drift_stops_the_run_at_the_next_check(drifted):
    assert (drifted.summary["status"], drifted.summary["steps"]) == ("failed", 5)
