"""Split models that do what is easily lost: draws, modules in place, buffers that move."""

from pathlib import Path

import pytest
from test_stages import ALL, STAY, TOLERANCE, difference, evaluated, refused, trained

TASKS = Path(__file__).with_name("split_tasks.py")


def task(name: str) -> tuple[str, str]:
    return "--task", f"{TASKS}:{name}"


@pytest.mark.parametrize(
    "name",
    ["RootIsTraining", "InPlace", "IntegersInPlace", "CountsAnew", "SpectralNorm"],
)
def test_the_curve_is_that_of_one_worker(name):
    stay = ("--set", "stage_cuts=[1]") if name in ("RootIsTraining", "IntegersInPlace") else STAY
    found = trained("torch", 2, 2, *task(name), *stay, *ALL)
    assert difference(found, trained("torch", 1, 1, *task(name), *ALL)) < TOLERANCE


@pytest.mark.parametrize("name", ["LossDraws", "LossDrawsByNumpy"])
def test_a_loss_draws_the_same_in_the_first_stage_and_in_the_last(name):
    found = trained("torch", 2, 2, *task(name), "--eval-every", "6")
    drawn = [line["same"] for line in found.metrics if line["phase"] == "train"]
    assert drawn == [1.0] * len(found.losses)
    assert set(evaluated(found, "same")) == {1.0}


@pytest.mark.parametrize(
    ("framework", "name", "said"),
    [
        ("torch", "WrongOfSequential", "the blocks compute other outputs than the model"),
        ("torch", "OwnForward", "the blocks compute other outputs than the model"),
        ("torch", "Asks", "the loss uses the model's factor"),
        ("tf", "LossDraws", "tf_loss draws random numbers"),
        ("tf", "RegularizedAtTheEnd", "losses of their own"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(framework, name, said, tmp_path):
    assert said in refused(tmp_path, framework, name, *task(name))
