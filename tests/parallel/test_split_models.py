"""Split models that do what is easily lost: draws, modules in place, buffers that move."""

from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.jobs import FRAMEWORKS
from support.pool import command
from test_stages import ALL, BASE, MPI, STAY, TOLERANCE, difference, refused, trained

RATE = 0.01
PLAIN_SGD = (
    *("--optimizer", "sgd", "--momentum", "0", "--set", "weight_decay=0", "--set", "clip_norm=null"),
    *("--learning-rate", str(RATE), "--lr-schedule", "constant", "--warmup-epochs", "0"),
    *("--steps", "3", "--save-every", "1", "--keep-last", "9"),
)
TASKS = Path(__file__).with_name("split_tasks.py")


def task(name: str) -> tuple[str, str]:
    return "--task", f"{TASKS}:{name}"


@pytest.mark.parametrize(
    "name",
    ["RootIsTraining", "InPlace", "IntegersInPlace", "CountsAnew"],
)
def test_the_curve_is_that_of_one_worker(name):
    stay = ("--set", "stage_cuts=[1]") if name in ("RootIsTraining", "IntegersInPlace") else STAY
    found = trained("torch", 2, 2, *task(name), *stay, *ALL)
    assert difference(found, trained("torch", 1, 1, *task(name), *ALL)) < TOLERANCE


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_backward_pass_draws_what_the_forward_pass_drew(framework):
    """The sum of weights times their gradients is then the loss."""
    found = trained(framework, 2, 2, *task("DropsOut"), *PLAIN_SGD, "--set", "stage_cuts=[3]", accumulate=3)
    kernels = [first_kernel(found.folder / "checkpoints" / f"step-{step:08}") for step in (1, 2, 3)]
    for before, after, loss in zip(kernels[:-1], kernels[1:], found.losses[1:], strict=True):
        gradient = (before - after) / RATE
        assert float((gradient * before).sum()) == pytest.approx(loss, rel=1e-3)


@pytest.mark.parametrize(
    ("framework", "name", "is_noted"),
    [("torch", "TrainsOtherwise", True), ("torch", "DropsOut", False)],
)
def test_blocks_that_differ_in_training_are_noted(framework, name, is_noted, tmp_path):
    words = ["--framework", framework, *BASE, *task(name), "--stages", "2", "--check"]
    made = command(2, MPI, framework, *words, cwd=tmp_path)
    assert made.returncode == 0, made.output
    assert ("in training, the blocks compute other outputs than the model" in made.output) == is_noted


def first_kernel(checkpoint: Path) -> np.ndarray:
    arrays = load_file(checkpoint / "model.safetensors")
    return next(array.astype(np.float64) for array in arrays.values() if array.shape == (64, 32))


@pytest.mark.parametrize(
    ("framework", "name", "said"),
    [
        ("torch", "OwnForward", "the blocks compute other outputs than the model"),
        ("tf", "RegularizedAtTheEnd", "losses of their own"),
    ],
)
def test_what_would_be_computed_wrongly_is_refused(framework, name, said, tmp_path):
    assert said in refused(tmp_path, framework, name, *task(name))
