"""PowerSGD in whole jobs: one curve at any number of workers and in both frameworks, also when resumed."""

import numpy as np
import pytest
from support.jobs import temporary_folder
from support.pool import command, controller_of, shared_run, train

STEPS = 50
OPTIONS = (
    *("--compression", "powersgd:4", "--global-batch-size", "30", "--warmup-steps", "10", "--log-every", "1"),
    *("--eval-every", "null", "--save-every", "null"),
)
TOLERANCE = 1e-3


def run(framework, workers):
    return shared_run(
        workers, controller_of(framework, workers), "--framework", framework, "--steps", str(STEPS), *OPTIONS
    )


@pytest.fixture(scope="module")
def curve():
    """The losses of one worker in PyTorch."""
    return np.asarray(run("torch", 1).losses)


@pytest.mark.parametrize(("framework", "workers"), [("tf", 2), ("torch", 3)])
def test_the_curve_does_not_depend_on_workers_and_framework(framework, workers, curve):
    found = np.asarray(run(framework, workers).losses)
    assert len(found) == STEPS
    assert np.abs(found - curve).max() < TOLERANCE


def test_the_plan_names_rank_and_bytes():
    said = run("torch", 1).result.stdout
    assert "sent by PowerSGD of rank 4: 0.0284 MB of 0.605 MB a step (4.7 %), uncompressed during" in said


def test_a_run_goes_on_in_the_other_framework_and_back(curve):
    cwd = temporary_folder()
    losses = []
    legs = [("torch", 2, "mpi", 20), ("tf", 1, "none", 35), ("torch", 1, "none", STEPS)]
    for framework, workers, controller, steps in legs:
        # the learning rate is constant, so that more steps are no other schedule
        words = ("--steps", str(steps), "--set", "lr_schedule=constant", "--resume", "auto", *OPTIONS)
        losses = train(workers, controller, "--framework", framework, *words, cwd=cwd).losses
    whole = train(
        1, "none", "--framework", "torch", "--steps", str(STEPS), "--set", "lr_schedule=constant", *OPTIONS,
        cwd=temporary_folder(),
    ).losses  # fmt: skip
    assert len(losses) == STEPS
    assert np.abs(np.asarray(losses) - np.asarray(whole)).max() < TOLERANCE
    # without compression, and with it again, what was not sent is dropped, and said to be
    more = (
        "--set",
        "lr_schedule=constant",
        "--resume",
        "auto",
        "--run-dir",
        str(cwd / "run"),
        "--framework",
        "torch",
    )
    off = command(1, "none", "torch", *more, *OPTIONS, "--compression", "none", "--steps", "52", cwd=cwd)
    assert "compression powersgd:4 -> none" in off.stdout
    assert "what PowerSGD had not sent yet is dropped" in off.stdout
    on = command(1, "none", "torch", *more, *OPTIONS, "--steps", "54", cwd=cwd)
    assert "its error starts from zero" in on.stdout
