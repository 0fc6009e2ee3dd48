"""Training that ends when nothing gets better: on all workers at one step, and known after a resume."""

import shutil

import pytest
from support.jobs import FRAMEWORKS, temporary_folder
from support.pool import controller_of, shared_run, train
from support.resuming import said

# the loss falls, so by loss:max the first evaluation stays the best
OPTIONS = (
    *("--epochs", "5", "--eval-every", "10", "--save-every", "1epoch", "--early-stopping", "loss:max"),
    *("--set", "early_stopping_patience=2", "--global-batch-size", "64"),
)
WHY = "stopped early at step 30: loss has not improved for 2 evaluations (best "


def stopped(framework: str):
    return shared_run(2, controller_of(framework, 2), "--framework", framework, *OPTIONS)


def resumed(*options: str):
    """Go on with a copy of PyTorch's run, with one worker."""
    folder = temporary_folder()
    shutil.copytree(stopped("torch").folder, folder / "run")
    return train(1, "none", "--framework", "torch", *OPTIONS, "--resume", *options, cwd=folder)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_it_ends_after_the_evaluation_completed_saved_and_said(framework):
    ended = stopped(framework)
    assert WHY in said(ended)
    assert ended.summary["stopped_early"].startswith(WHY)
    assert (ended.summary["status"], ended.summary["steps"]) == ("completed", 30)
    assert ended.summary["checkpoint"].endswith("step-00000030")
    assert [line["step"] for line in ended.metrics if line["phase"] == "eval"] == [10, 20, 30]


def test_with_more_patience_it_goes_on_and_still_counts_from_the_best():
    on = resumed("--set", "early_stopping_patience=3")
    assert "stopped early at step 40: loss has not improved for 3 evaluations (best " in said(on)
    assert on.summary["steps"] == 40
