"""A run goes on with another number of workers, in the other framework, with other settings."""

from itertools import pairwise

import numpy as np
import pytest
from support.jobs import temporary_folder
from support.resuming import (
    command_for,
    killed_at,
    random_step,
    resumed_from,
    said,
    stopped_at,
    stream_of,
    trained,
    trained_steps,
)

TOLERANCE = 1e-4  # relative, per step: the design's promise
SAMPLES, EPOCHS, STEPS = 1438, 3, 87  # digits in batches of 50, which three workers do not divide
SAMPLE_SECONDS = 0.001
DIGITS = (
    *("--epochs", str(EPOCHS), "--global-batch-size", "50", "--optimizer", "adamw", "--log-every", "1"),
    *("--learning-rate", "0.001", "--save-every", "5", "--set", "trace_indices=true", "--resume"),
)


def digits(framework: str, workers: int = 1, controller: str = "none") -> tuple:
    return (workers, controller, "ReadSlowly", "--framework", framework, *DIGITS)


def leg(framework: str, workers: int = 1, controller: str = "none") -> list[str]:
    """Return the command of a leg that something ends: it is a job of its own."""
    return command_for(*digits(framework, workers, controller))


@pytest.fixture(scope="module")
def uninterrupted():
    """Train in one go, in PyTorch with one worker."""
    return trained(*digits("torch"), cwd=temporary_folder())


# framework, workers and controller of each leg
WAYS = {
    "torch-1-3-2-workers": (("torch",), ("torch", 3, "gloo"), ("torch", 2, "mpi")),
    "torch-tf-torch": (("torch",), ("tf",), ("torch",)),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_in_three_legs_is_that_of_one_worker_in_one_go(way, uninterrupted):
    """The first leg is asked to stop; the second likewise, or several workers are killed."""
    (one, other, last), folder = WAYS[way], temporary_folder()
    second = stopped_at(random_step(7, 20, way), leg(*one), folder, SAMPLE_SECONDS)
    disturb = killed_at if len(other) > 1 else stopped_at
    disturb(random_step(37, 50, way), leg(*other), folder, SAMPLE_SECONDS)
    run = trained(*digits(*last), cwd=folder)
    third = resumed_from(run)[0]
    assert trained_steps(run) == list(range(1, STEPS + 1))
    assert 0 < second < third < STEPS
    assert all(step * 50 % SAMPLES for step in (second, third)), "in the middle of an epoch"
    differences = np.abs(np.asarray(run.losses) / np.asarray(uninterrupted.losses) - 1)
    bounds = [0, second, third, STEPS]
    largest = [float(differences[first:last].max()) for first, last in pairwise(bounds)]
    print(f"legs begin after steps {bounds[:-1]}; largest relative difference of each: {largest}")
    assert max(largest) < TOLERANCE
    stream = stream_of(run)
    assert len(stream) == EPOCHS * SAMPLES
    for epoch in range(EPOCHS):
        assert sorted(stream[epoch * SAMPLES : (epoch + 1) * SAMPLES]) == list(range(SAMPLES))


def test_another_batch_and_learning_rate_are_allowed_and_said():
    before = (
        *("--framework", "torch", "--epochs", "2", "--batch-size", "4", "--learning-rate", "0.01"),
        *("--set", "trace_indices=true"),
    )
    folder = temporary_folder()
    trained(1, "none", "Fit", *before, cwd=folder)
    options = (*before, "--resume", "--epochs", "3", "--batch-size", "6", "--learning-rate", "0.02")
    changed = trained(1, "none", "Fit", *options, cwd=folder)
    assert "changed epochs 2 -> 3, batch_size 4 -> 6, learning_rate 0.01 -> 0.02" in said(changed)
    lines = {line["step"]: line for line in changed.metrics if line["phase"] == "train"}
    assert (lines[26]["samples"] - lines[25]["samples"], lines[26]["learning_rate"]) == (6, 0.02)
    stream = stream_of(changed)
    for epoch in range(3):
        assert sorted(stream[epoch * 50 : (epoch + 1) * 50]) == list(range(50))
