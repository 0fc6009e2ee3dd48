"""Sharded state: the curves, checkpoints and memory of jobs whose workers keep parts of it."""

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
SGD = ("--optimizer", "sgd", "--learning-rate", "0.05", "--weight-decay", "0.001")


def trained(framework: str, workers: int, shard: str, *options: str) -> Run:
    words = ("--framework", framework, *BASE, *options, *("--shard", shard) * (shard != "none"))
    return shared_run(workers, controller_of(framework, workers), *words)


def evaluated(run: Run) -> list[float]:
    return [line["loss"] for line in run.metrics if line["phase"] == "eval"]


def saved(run: Run) -> dict[str, np.ndarray]:
    folder = run.folder / "checkpoints" / f"step-{SAVED:08}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


@pytest.mark.parametrize(
    ("framework", "workers", "shard"),
    [("torch", 2, "optimizer"), ("tf", 2, "optimizer"), ("torch", 3, "gradients"), ("tf", 2, "gradients")],
)
def test_sharded_state_draws_the_same_curve(framework, workers, shard):
    """The optimizer alone sharded changes no number."""
    run, expected = (trained(framework, workers, kind, *ALL) for kind in (shard, "none"))
    curve, numbers = (0, 0) if shard == "optimizer" else (TOLERANCE, 1e-3)
    assert run.difference(expected) <= curve
    np.testing.assert_allclose(evaluated(run), evaluated(expected), rtol=curve)
    found, wanted = saved(run), saved(expected)
    assert found.keys() == wanted.keys()
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=numbers, atol=numbers * np.abs(array).max())


def test_sharded_gradients_travel_compressed():
    run = trained("torch", 2, "gradients", *SGD, "--compression", "fp16")
    expected = trained("torch", 2, "none", *SGD)
    assert 0 < run.difference(expected) < 0.05


def test_low_rank_with_a_sharded_optimizer():
    run, expected = (
        trained("tf", 2, shard, *SGD, "--compression", "powersgd:2") for shard in ("optimizer", "none")
    )
    assert run.losses == expected.losses


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
