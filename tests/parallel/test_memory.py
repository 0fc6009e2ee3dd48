"""Jobs that run out of memory, by a real limit on the address space, and what is logged of the peak."""

import sys
from pathlib import Path

import pytest
from support import pool
from support.jobs import run

TASKS = Path(__file__).with_name("memory_tasks.py")


@pytest.mark.parametrize(
    ("framework", "task", "where"),
    [
        ("torch", "Filling", "the first batch of the training data fails, out of memory: "),
        ("tf", "FillingLater", "training failed at step "),
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


def test_the_log_and_the_summary_have_the_peak_of_the_heaviest_worker(tmp_path):
    words = ["--framework", "torch", "--task", f"{TASKS}:Uneven", "--batch-size", "4", "--steps", "12"]
    made = pool.train(2, "gloo", *words, "--log-every", "4", "--eval-every", "8", cwd=tmp_path)
    peaks = [float((made.folder / f"rank-{rank}").read_text()) for rank in range(2)]
    heaviest = max(peaks)  # rank 1, unless an earlier case of the pool took more on rank 0
    assert made.summary["peak_memory_mib"] == pytest.approx(heaviest, rel=0.02)
    found = {(line["phase"], line["step"]): line["peak_memory_mib"] for line in made.metrics}
    assert list(found.values()) == sorted(found.values())
    assert found["train", 12] == pytest.approx(heaviest, rel=0.02)
    assert found.keys() >= {("eval", 8), ("eval", 12)}
    assert f"at most {made.summary['peak_memory_mib']:,.0f} MiB of memory per worker" in made.result.output
