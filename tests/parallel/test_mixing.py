"""Mixed, drawn and sorted samples give equal curves with any number of workers and in both frameworks."""

import json
from pathlib import Path

import pytest
from support import pool

TASK = Path(__file__).with_name("mixing_tasks.py")

OPTIONS = (
    *("--log-every", "1", "--save-every", "2", "--global-batch-size", "10"),
    *("--set", "initial_parameters=portable"),
)
MIXED = ("--mixup", "0.2", "--cutmix", "1.0", "--label-smoothing", "0.1")


def curve(framework, workers, controller, folder, task_options):
    options = ("--framework", framework, "--run-dir", str(folder), *OPTIONS, "--task", *task_options)
    for more in (("--steps", "2"), ("--steps", "4", "--resume")):
        done = pool.command(workers, controller, framework, "train", *options, *more, cwd=folder.parent)
        assert done.returncode == 0, done.output
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["loss"], line["accuracy"]) for line in lines]


@pytest.mark.parametrize(
    "task_options", [(f"{TASK}:Images", *MIXED), (f"{TASK}:Texts",)], ids=["mixed", "sorted"]
)
def test_curves_of_mixed_drawn_and_sorted_samples_are_equal(task_options, tmp_path):
    one = curve("torch", 1, "none", tmp_path / "one", task_options)
    assert len(one) >= 4
    for framework, workers in (("torch", 2), ("tf", 2)):
        found = curve(
            framework, workers, pool.controller_of(framework, workers), tmp_path / framework, task_options
        )
        for pair, expected in zip(found, one, strict=True):
            assert pair == pytest.approx(expected, rel=2e-5)
