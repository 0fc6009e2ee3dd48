"""A run goes on with another number of workers, in the other framework, with other settings."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from support.jobs import Run, temporary_folder
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


@dataclass(frozen=True)
class Legs:
    """A run in three legs.

    Args:
        run: the run, after the last of them.
        second, third: steps after which the second and the third leg began.
    """

    run: Run
    second: int
    third: int


def digits(framework: str, workers: int = 1, controller: str = "none") -> tuple:
    return (workers, controller, "ReadSlowly", "--framework", framework, *DIGITS)


def leg(framework: str, workers: int = 1, controller: str = "none") -> list[str]:
    """Return the command of a leg that something ends: it is a job of its own."""
    return command_for(*digits(framework, workers, controller))


@pytest.fixture(scope="module")
def uninterrupted():
    """Train in one go, in PyTorch with one worker."""
    return trained(*digits("torch"), cwd=temporary_folder())


def over_worker_counts(framework: str) -> Legs:
    """Train with one worker, then three, then two; the one is asked to stop, the three are killed."""
    folder = temporary_folder()
    second = stopped_at(random_step(7, 20, framework), leg(framework), folder, SAMPLE_SECONDS)
    killed_at(random_step(37, 50, framework), leg(framework, 3, "gloo"), folder, SAMPLE_SECONDS)
    last = trained(*digits(framework, 2, "mpi"), cwd=folder)
    return Legs(last, second, resumed_from(last)[0])


def over_frameworks() -> Legs:
    """Train in PyTorch, then in TensorFlow, then in PyTorch again; each is asked to stop."""
    folder = temporary_folder()
    second = stopped_at(random_step(7, 20, "first"), leg("torch"), folder, SAMPLE_SECONDS)
    stopped_at(random_step(37, 50, "second"), leg("tf"), folder, SAMPLE_SECONDS)
    last = trained(*digits("torch"), cwd=folder)
    return Legs(last, second, resumed_from(last)[0])


WAYS = {
    "torch-1-3-2-workers": lambda: over_worker_counts("torch"),
    "torch-tf-torch": over_frameworks,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_run_in_three_legs_is_that_of_one_worker_in_one_go(way, uninterrupted):
    legs = WAYS[way]()
    assert trained_steps(legs.run) == list(range(1, STEPS + 1))
    assert 0 < legs.second < legs.third < STEPS
    assert all(step * 50 % SAMPLES for step in (legs.second, legs.third)), "in the middle of an epoch"
    differences = np.abs(np.asarray(legs.run.losses) / np.asarray(uninterrupted.losses) - 1)
    bounds = [0, legs.second, legs.third, STEPS]
    largest = [float(differences[first:last].max()) for first, last in pairwise(bounds)]
    print(f"legs begin after steps {bounds[:-1]}; largest relative difference of each: {largest}")
    assert max(largest) < TOLERANCE
    stream = stream_of(legs.run)
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
