"""Sharded state: the curves, checkpoints and memory of jobs whose workers keep parts of it."""

import functools
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.jobs import Run
from support.pool import controller_of, run_suite, shared_run

SUITE = Path(__file__).with_name("suite_sharded.py")
STEPS, SAVED = 20, 10
TOLERANCE = 1e-5  # relative, per step, of jobs whose sums have another order
BASE = ("--steps", str(STEPS), "--log-every", "1", "--global-batch-size", "50")
ALL = (  # whatever a step may do at once
    *("--optimizer", "adamw", "--learning-rate", "0.002", "--weight-decay", "0.01", "--ema-decay", "0.9"),
    *("--set", "decay_norms_and_biases=false", "--accumulate", "2", "--clip-norm", "0.5"),
    *("--set", 'parameter_groups=[{"match": "*bias", "learning_rate_factor": 2}]'),
    *("--save-every", str(SAVED), "--keep-last", "9", "--eval-every", str(SAVED)),
)
SETTINGS = {
    "sgd": ("--optimizer", "sgd", "--learning-rate", "0.05", "--weight-decay", "0.001"),
    "all": ALL,
}


def trained(framework: str, workers: int, shard: str, *options: str) -> Run:
    return shared_run(
        workers,
        controller_of(framework, workers),
        *("--framework", framework),
        *BASE,
        *options,
        *("--shard", shard) * (shard != "none"),
    )


def difference(run: Run, expected: Run) -> float:
    assert len(run.losses) == len(expected.losses) > 0
    return float(np.max(np.abs(np.divide(run.losses, expected.losses) - 1)))


def evaluated(run: Run) -> list[float]:
    return [line["loss"] for line in run.metrics if line["phase"] == "eval"]


@functools.cache
def saved(run_folder, step: int) -> dict[str, np.ndarray]:
    folder = run_folder / "checkpoints" / f"step-{step:08}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_equal_states(run: Run, expected: Run, tolerance: float) -> None:
    found, wanted = saved(run.folder, SAVED), saved(expected.folder, SAVED)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance * np.abs(array).max())


@pytest.mark.parametrize(("framework", "workers"), [("torch", 2), ("tf", 2)])
def test_the_optimizer_alone_sharded_changes_no_number(framework, workers):
    run, expected = (trained(framework, workers, shard, *ALL) for shard in ("optimizer", "none"))
    assert run.losses == expected.losses
    assert evaluated(run) == evaluated(expected)
    assert_equal_states(run, expected, 0)


@pytest.mark.parametrize(("framework", "workers"), [("torch", 3), ("tf", 2)])
def test_sharded_gradients_draw_the_same_curve(framework, workers):
    run, expected = (trained(framework, workers, shard, *ALL) for shard in ("gradients", "none"))
    assert difference(run, expected) < TOLERANCE
    np.testing.assert_allclose(evaluated(run), evaluated(expected), rtol=TOLERANCE)
    assert_equal_states(run, expected, 1e-3)


@pytest.mark.parametrize(("framework", "compression"), [("torch", "fp16")])
def test_sharded_gradients_travel_compressed(framework, compression):
    options = (*SETTINGS["sgd"], "--compression", compression)
    run, expected = (
        trained(framework, 2, "gradients", *options),
        trained(framework, 2, "none", *SETTINGS["sgd"]),
    )
    assert run.losses != expected.losses
    assert difference(run, expected) < 0.05


@pytest.mark.parametrize("framework", ["tf"])
def test_low_rank_with_a_sharded_optimizer(framework):
    options = (*SETTINGS["sgd"], "--compression", "powersgd:2")
    assert (
        trained(framework, 2, "optimizer", *options).losses == trained(framework, 2, "none", *options).losses
    )


# 3 workers have unequal parts
@pytest.mark.parametrize(("framework", "workers"), [("torch", 3), ("tf", 2)])
def test_the_backend_keeps_and_saves_parts(framework, workers, tmp_path):
    run_suite(SUITE, workers, controller_of(framework, workers), framework, cwd=tmp_path, timeout=550)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (("torch", 3, "gradients"), ("tf", 1, "none")),
        (("tf", 2, "optimizer"), ("torch", 2, "optimizer")),
    ],
)
def test_a_run_goes_on_with_another_sharding(source, target):
    checkpoint = trained(*source, *ALL).folder / "checkpoints" / f"step-{SAVED:08}"
    run, expected = trained(*target, *ALL, "--resume", str(checkpoint)), trained(*source, *ALL)
    assert len(run.losses) == STEPS - SAVED
    np.testing.assert_allclose(run.losses, expected.losses[SAVED:], rtol=1e-4)
    np.testing.assert_allclose(evaluated(run)[-1], evaluated(expected)[-1], rtol=1e-4)
