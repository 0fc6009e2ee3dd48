"""The dry run in real jobs: what it refuses, in both frameworks, and what ``--check`` shows."""

from pathlib import Path

import pytest
from support.pool import command, controller_of

TASKS = Path(__file__).with_name("mistaken_tasks.py")
SOURCE = TASKS.read_text().splitlines()

# task: what its message must hold
REFUSED = {
    "WrongWidth": ["the first batch of the training data fails: ", "It has inputs float32 (16, 8)"],
    "OwnLine": [
        f"{TASKS}, line {1 + SOURCE.index('        return outputs.no_such_attribute')}: AttributeError",
        "the model's outputs are float32 (16, 3)",
    ],
}


# one in each framework: what is found is proved in tests/unit
@pytest.mark.parametrize(("framework", "task"), [("tf", "WrongWidth"), ("torch", "OwnLine")])
def test_a_task_is_refused_before_the_first_step(framework, task, tmp_path):
    words = ["--framework", framework, "--task", f"{TASKS}:{task}", "--run-dir", str(tmp_path / "run")]
    result = command(1, "none", framework, *words, cwd=tmp_path)
    assert result.returncode == 2, result.output
    for text in REFUSED[task]:
        assert result.stderr.count(text) == 1, result.output
    assert "Traceback" not in result.output
    assert "\x1b" not in result.stderr
    assert len(result.stderr.splitlines()) <= 6
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("framework", ["torch"])
def test_a_check_of_two_workers_shows_what_training_would_compute(framework, tmp_path):
    words = [
        "--framework",
        framework,
        "--task",
        f"{TASKS}:Frozen",
        "--run-dir",
        str(tmp_path / "run"),
        "--check",
    ]
    result = command(2, controller_of(framework, 2), framework, *words, cwd=tmp_path)
    assert result.returncode == 0, result.output
    lines = [line.strip() for line in result.stdout.splitlines()]
    assert "2 workers; nothing was trained" in lines[0]
    assert lines[1] == "model       73 parameters, 18 of them trained, in 2 tensors"
    assert lines[2] == "training    inputs float32 (16, 8), targets int64 (16,)"
    assert lines[3] == "outputs float32 (16, 3)"
    assert lines[4].startswith("loss ")
    assert not result.spoke
    assert list(tmp_path.iterdir()) == []
