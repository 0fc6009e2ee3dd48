"""Jobs that run out of memory: a real limit on the address space of the process."""

import sys
from pathlib import Path

import pytest
from support.jobs import run

TASKS = Path(__file__).with_name("memory_tasks.py")


@pytest.mark.parametrize(
    ("framework", "task", "where"),
    [
        ("torch", "Early", "the first batch of the training data fails, out of memory: "),
        ("torch", "Late", "training failed at step "),
        ("tf", "Early", "the first batch of the training data fails, out of memory: "),
        ("tf", "Late", "training failed at step "),
    ],
)
def test_a_lack_of_memory_is_named_with_what_helps(framework, task, where, tmp_path):
    # a process of its own: the limit stays until it ends
    words = ["--framework", framework, "--task", f"{TASKS}:{task}", "--run-dir", str(tmp_path / "run")]
    words += ["--batch-size", "64", "--steps", "4", "--set", "initial_parameters=model"]
    result = run([sys.executable, "-m", "hvdtrain", *words], tmp_path)
    assert result.returncode == 4, result.output
    assert where in result.output
    assert "out of memory" in result.output
    assert "Its largest parameters: model/first/kernel" in result.output
    assert "--batch-size 32 --accumulate 2" in result.output
    assert "Traceback" not in result.output
