"""Mixed and drawn samples give equal curves at any number of workers, in both frameworks, and resumed."""

import json
from pathlib import Path

import pytest
from support import pool

TASK = Path(__file__).with_name("mixing_tasks.py")

OPTIONS = (
    *("--mixup", "0.2", "--cutmix", "1.0", "--label-smoothing", "0.1", "--global-batch-size", "10"),
    *("--log-every", "1", "--save-every", "2", "--set", "initial_parameters=portable"),
)


def curve(framework, workers, controller, folder):
    options = ("--framework", framework, "--task", f"{TASK}:Images", "--run-dir", str(folder), *OPTIONS)
    for more in (("--steps", "2"), ("--steps", "4", "--resume")):
        done = pool.command(workers, controller, framework, "train", *options, *more, cwd=folder.parent)
        assert done.returncode == 0, done.output
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["accuracy"]) for line in lines]


def test_curves_of_mixed_samples_are_equal(tmp_path):
    one = curve("torch", 1, "none", tmp_path / "one")
    assert len(one) >= 4
    for framework, workers in (("torch", 2), ("tf", 2)):
        found = curve(framework, workers, "mpi", tmp_path / framework)
        for pair, expected in zip(found, one, strict=True):
            assert pair == pytest.approx(expected, rel=2e-5)
