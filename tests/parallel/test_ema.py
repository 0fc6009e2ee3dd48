"""The moving average of the weights: its formula, exact resumes, and who uses it."""

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.jobs import FRAMEWORKS, Run, temporary_folder
from support.pool import train
from support.resuming import TASKS, logged, said
from support.serving import hvdtrain, last_eval

DECAY, STEPS, HALF = 0.9, 12, 6
TASK = f"{TASKS}:Fit"
OPTIONS = (
    *("--task", TASK, "--steps", str(STEPS), "--global-batch-size", "8", "--learning-rate", "0.02"),
    *("--save-every", "1", "--set", "keep_last=null", "--eval-every", "6"),
)
EMA = ("--ema-decay", str(DECAY))
JOBS = [("torch", 1), ("tf", 1), ("torch", 2)]


@functools.cache
def trained(framework: str, workers: int, *options: str) -> Run:
    controller = "none" if workers == 1 else "mpi"
    arguments = ("--framework", framework, *OPTIONS, *options)
    return train(workers, controller, *arguments, cwd=temporary_folder())


def checkpoint(run: Run, step: int) -> Path:
    return run.folder / "checkpoints" / f"step-{step:08d}"


def arrays(run: Run, step: int, prefix: str) -> dict[str, np.ndarray]:
    """Give the arrays of a checkpoint that lie below a prefix."""
    state = load_file(checkpoint(run, step) / "model.safetensors")
    return {name.removeprefix(prefix): a for name, a in state.items() if name.startswith(prefix)}


def assert_close(found: dict, expected: dict, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    assert found
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=tolerance, err_msg=name)


def close(found: list, expected: list, tolerance: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=tolerance)


@pytest.mark.parametrize(("framework", "workers"), JOBS)
def test_each_step_moves_the_average_by_the_formula(framework, workers):
    """Neither the number of workers nor the framework changes the curve or the average."""
    run, reference = trained(framework, workers, *EMA), trained("torch", 1, *EMA)
    averages = arrays(run, 1, "ema/")
    for step in range(2, STEPS + 1):
        decay = min(DECAY, (1 + step) / (10 + step))
        weights = arrays(run, step, "model/")
        averages = {name: decay * a + (1 - decay) * weights[name] for name, a in averages.items()}
        assert_close(arrays(run, step, "ema/"), averages, 1e-6)
    close(run.losses, reference.losses, 1e-4)
    close([last_eval(run)["loss"]], [last_eval(reference)["loss"]], 1e-4)
    assert_close(arrays(run, STEPS, "ema/"), arrays(reference, STEPS, "ema/"), 1e-5)


@pytest.mark.parametrize(("framework", "workers"), JOBS[1:])
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(framework, workers):
    whole, other = trained(framework, workers, *EMA), trained("torch", 1, *EMA)
    resumed = trained(framework, workers, *EMA, "--resume", str(checkpoint(whole, HALF)))
    assert logged(resumed) == [line for line in logged(whole) if line["step"] > HALF]
    found, expected = (checkpoint(run, STEPS) / "model.safetensors" for run in (resumed, whole))
    assert found.read_bytes() == expected.read_bytes()
    switched = trained(framework, workers, *EMA, "--resume", str(checkpoint(other, HALF)))
    assert_close(arrays(switched, STEPS, "ema/"), arrays(other, STEPS, "ema/"), 1e-5)


def test_what_is_evaluated_and_exported_is_the_average_unless_it_is_left_out():
    folder, task = temporary_folder(), ("--task", TASK)
    for framework in FRAMEWORKS:
        shutil.copytree(trained(framework, 1, *EMA).folder, folder / framework)
    commands = {
        "torch": ["evaluate", "torch", *task, "--output", "torch.jsonl"],
        "tf": ["evaluate", "tf", *task, "--framework", "torch", "--output", "tf.jsonl"],
        "own": ["evaluate", "torch", *task, "--set", "ema_decay=null", "--output", "own.jsonl"],
        "export": ["export", "torch", *task, "--to", "safetensors", "--output", "model.safetensors"],
    }
    results = dict(zip(commands, hvdtrain(*commands.values(), cwd=folder, framework="torch"), strict=True))
    assert [error for _, error in results.values()] == [""] * len(commands)
    printed = {name: text for name, (text, _) in results.items()}
    lines = {name: json.loads((folder / f"{name}.jsonl").read_text()) for name in ("torch", "tf", "own")}
    for framework in FRAMEWORKS:
        close([lines[framework]["loss"]], [last_eval(trained(framework, 1, *EMA))["loss"]], 1e-5)
        assert lines[framework]["averaged_weights"] is True
        assert f"EMA weights, step {STEPS}" in printed[framework]
    assert abs(lines["own"]["loss"] / lines["torch"]["loss"] - 1) > 1e-3
    assert lines["own"]["averaged_weights"] is False
    assert "EMA" not in printed["own"]
    weights = load_file(folder / "model.safetensors")
    averages = arrays(trained("torch", 1, *EMA), STEPS, "ema/")
    np.testing.assert_array_equal(weights["0.weight"].T, averages["0/kernel"])
    assert f"step {STEPS}, EMA weights" in " ".join(printed["export"].split())


def test_a_run_that_starts_from_it_starts_from_the_average():
    source = trained("torch", 1, *EMA)
    tuned = trained("torch", 1, "--init", str(source.folder), "--learning-rate", "1e-30", "--steps", "1")
    assert "EMA weights of" in said(tuned)
    assert_close(arrays(tuned, 1, "model/"), arrays(source, STEPS, "ema/"), 1e-7)
