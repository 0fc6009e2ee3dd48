"""A task's own optimizer trains with its own learning rates, scaled with the workers."""

import functools
from pathlib import Path

import numpy as np
import pytest
import yaml
from safetensors.numpy import load_file
from support.jobs import FRAMEWORKS, Run, temporary_folder
from support.pool import controller_of, train
from support.serving import hvdtrain

TASKS = Path(__file__).with_name("rates_tasks.py")
EVERY_STEP = ("--save-every", "1", "--set", "keep_last=null")
UNUSED = ("--weight-decay", "0.5")  # the optimizers have none
# by framework and task: the base, and the rates of kernel and bias at two workers
RATES = {
    ("tf", "Lion"): (5e-4, (1e-3, 1e-3)),
    ("torch", "Groups"): (5e-3, (1e-3, 1e-2)),
}


@functools.cache
def trained(framework: str, task: str, *options: str) -> Run:
    words = ("--framework", framework, "--task", f"{TASKS}:{task}", "--steps", "3", *EVERY_STEP, *UNUSED)
    return train(2, controller_of(framework, 2), *words, *options, cwd=temporary_folder())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_tasks_schedule_multiplies_the_rate_at_the_middle_of_each_step(framework):
    run = trained(framework, "Scheduled")
    epochs = [line["epoch"] / line["step"] for line in run.metrics if line["phase"] == "train"]
    rates = [1e-3 / (1 + (step - 0.5) * epoch) for step, epoch in enumerate(epochs, 1)]
    assert [line["learning_rate"] for line in run.metrics if line["phase"] == "train"] == pytest.approx(rates)
    assert moved(run, 2) == pytest.approx([rates[1]] * 2, rel=1e-3)
    assert "times the task's learning_rate_factor" in run.result.stdout


def moved(run: Run, step: int) -> list[float]:
    """Give how far kernel and bias moved in a step."""
    folders = [run.folder / "checkpoints" / f"step-{number:08d}" for number in (step, step - 1)]
    now, before = (load_file(folder / "model.safetensors") for folder in folders)
    steps = {name.rpartition("/")[2]: np.abs(now[name] - before[name]) for name in now}
    return [float(np.median(steps[role])) for role in ("kernel", "bias")]


@pytest.mark.parametrize(("framework", "task"), RATES)
def test_the_optimizers_rates_are_the_base_and_scale_with_the_workers(framework, task):
    run = trained(framework, task)
    base, rates = RATES[framework, task]
    assert moved(run, 2) == pytest.approx(rates, rel=1e-3)
    logged = [line["learning_rate"] for line in run.metrics if line["phase"] == "train"]
    assert logged == [2 * base] * 3
    assert f"{2 * base:g} = {base:g} (the optimizer's own) x 2 (linear rule" in run.result.stdout
    assert "note: weight_decay 0.5 has no effect: the task brings its own optimizer" in run.result.stdout
    groups = "constant; 2 parameter groups at 0.001, 0.01"
    assert (groups in run.result.stdout) == (task == "Groups")
    assert yaml.safe_load((run.folder / "config.yaml").read_text())["learning_rate"] == base
    repeated = trained(framework, task, str(run.folder / "config.yaml"))
    assert repeated.losses == run.losses
    resumed = trained(framework, task, "--resume", str(run.folder / "checkpoints" / "step-00000001"))
    assert resumed.losses == run.losses[1:]
    assert "changed" not in resumed.result.stdout
    assert moved(resumed, 3) == pytest.approx(rates, rel=1e-3)


def test_another_rate_in_the_config_does_not_keep_a_checkpoint_from_evaluation():
    """That it keeps it from training is in unit/test_own_optimizer.py."""
    words = ["evaluate", str(trained("tf", "Lion").folder), "--task", f"{TASKS}:Lion"]
    words += ["--set", "learning_rate=0.02"]
    (evaluated,) = hvdtrain(words, cwd=temporary_folder(), framework="tf")
    assert "step 3" in evaluated[0]
