"""The schedule plateau: one rate on all workers, and the same one after a resume in the other framework."""

import functools

import pytest
from support.jobs import Run, temporary_folder
from support.pool import train
from support.resuming import TASKS, said

# the loss falls, so by loss:max the first evaluation stays the best
OPTIONS = (
    *("--task", f"{TASKS}:Fit", "--steps", "12", "--global-batch-size", "8", "--save-every", "4"),
    *("--eval-every", "2", "--lr-schedule", "plateau", "--learning-rate", "0.01"),
    *("--set", "plateau_metric=loss:max", "--set", "plateau_factor=0.5"),
)
LOWERED = "learning rate 0.01 -> 0.005 from step 7 on: loss has not improved for 2 evaluations (best "


@functools.cache
def trained(framework: str, workers: int, *options: str) -> Run:
    words = ("--framework", framework, *OPTIONS, *options)
    return train(workers, "none" if workers == 1 else "mpi", *words, cwd=temporary_folder())


def rates(run: Run) -> list[float]:
    return [line["learning_rate"] for line in run.metrics if line["phase"] == "train"]


@pytest.mark.parametrize(("source", "target"), [("torch", "tf")])
def test_the_rate_is_lowered_and_a_run_goes_on_with_it_in_the_other_framework(source, target):
    whole = trained(source, 2)
    assert rates(whole) == [0.01] * 6 + [0.005] * 4 + [0.0025] * 2
    assert LOWERED in said(whole)
    assert "0.01, x 0.5 after 2 evaluations in a row without a higher loss" in said(whole)
    resumed = trained(target, 1, "--resume", str(whole.folder / "checkpoints" / "step-00000008"))
    assert rates(resumed) == rates(whole)[8:]
    assert "without a higher loss; lowered to 0.005 so far" in said(resumed)
    assert resumed.losses == pytest.approx(whole.losses[8:], rel=1e-4)
