"""Metrics of a whole evaluation: the same at any number of workers, and in training as in an evaluation."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from metric_tasks import INPUTS, SAMPLES, Numbers, Tokens
from support.documents import ROOT, named_files
from support.jobs import FRAMEWORKS, temporary_folder
from support.pool import Key, call, command, controller_of, train

CASES = Path(__file__).with_name("metric_cases.py")
TASKS = Path(__file__).with_name("metric_tasks.py")
NAMES = ["Tokens", "Numbers", "OfBatchMean"]


@functools.cache
def evaluated(framework, workers):
    """Return the metrics of the tasks, and the rows that rank 0 gathered."""
    folder, key = temporary_folder(), Key(framework, controller_of(framework, workers), workers)
    found = call(key, f"{CASES}:evaluated", folder, framework=framework, tasks=NAMES).values
    assert all(of_rank == found[0] for of_rank in found)
    return found[0], {name: dict(np.load(folder / f"{name}.npz")) for name in NAMES}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_they_are_those_of_all_samples_in_their_order_at_any_number_of_workers(framework):
    """That each is what scikit-learn computes is in unit/test_evaluation_metrics.py."""
    (one, rows_of_one), (found, rows) = (evaluated(framework, workers) for workers in (1, 2))
    for name, task in (("Tokens", Tokens), ("Numbers", Numbers), ("OfBatchMean", Numbers)):
        np.testing.assert_array_equal(rows[name]["inputs"], task.data[0])
        np.testing.assert_array_equal(rows[name]["targets"], task.data[1])
        order = np.float32(task.data[0].reshape(SAMPLES, -1)[:, 0]) @ np.arange(SAMPLES)
        assert found[name]["rows"] == order
        # a product of matrices may round otherwise with another number of rows: how, depends on the processor
        outputs, expected = rows[name]["outputs"], rows_of_one[name]["outputs"]
        np.testing.assert_allclose(outputs, expected, rtol=1e-6, atol=1e-6)
        rel = 1e-9 if np.array_equal(outputs, expected) else 1e-6
        sums = [key for key in one[name] if key not in ("loss", "accuracy")]
        assert [found[name][key] for key in sums] == pytest.approx([one[name][key] for key in sums], rel=rel)
    assert list(found["Tokens"]) == ["loss", *Tokens.metrics]
    assert found["Tokens"]["auc"] == one["Tokens"]["auc"]
    assert found["Tokens"]["largest"] == pytest.approx(
        Tokens.data[0].sum(0, dtype=np.float64).max(), rel=1e-6
    )


def test_states_of_unequal_workers_reach_rank_0_in_chunks(tmp_path):
    call(Key("torch", "mpi", 2), f"{CASES}:gathered", tmp_path, framework="torch")


def test_training_keeps_the_best_by_one_and_evaluate_finds_it_again(tmp_path):
    words = ["--framework", "torch", "--task", f"{TASKS}:Tokens", "--keep-best", "f1", "--device", "cpu"]
    run = train(2, "mpi", *words, cwd=tmp_path)
    lines = {line["step"]: line for line in run.metrics if line["phase"] == "eval"}
    assert list(lines) == [1, 2, 3, 4]
    assert not any("f1" in line for line in run.metrics if line["phase"] == "train")
    best = max(lines, key=lambda step: (lines[step]["f1"], -step))
    checkpoint = run.folder / "checkpoints" / f"step-{best:08d}"
    assert run.summary["final"]["f1"] == lines[4]["f1"]
    options = ["--task", f"{TASKS}:Tokens", "--output", str(tmp_path / "line.jsonl")]
    result = command(1, "none", "torch", "evaluate", str(checkpoint), *options, cwd=tmp_path)
    assert result.returncode == 0, result.output
    line = json.loads((tmp_path / "line.jsonl").read_text())
    for name in Tokens.metrics:
        assert line[name] == pytest.approx(lines[best][name], rel=1e-6)


def test_rows_that_take_too_much_memory_are_refused_before_the_first_step(tmp_path):
    words = ["--framework", "torch", "--task", f"{TASKS}:Wide", "--run-dir", str(tmp_path / "run")]
    result = command(1, "none", "torch", *words, cwd=tmp_path)
    assert result.returncode == 2, result.output
    size = (2 + 2 + INPUTS) * 4
    assert "metrics['rows'] would gather" in result.stderr
    assert f"MiB on rank 0: {size} bytes for each of 53" in result.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_task_of_the_documents_has_objects_of_the_libraries(framework, tmp_path):
    (tmp_path / "answers.py").write_text(named_files(ROOT / "docs" / "metrics.md")["answers.py"])
    words = ["--framework", framework, "--task", f"{tmp_path}/answers.py:Answers", "--device", "cpu"]
    run = train(2, controller_of(framework, 2), *words, cwd=tmp_path)
    assert 0.65 < run.summary["final"]["auc"] < 1
    lines = {line["step"]: line for line in run.metrics if line["phase"] == "eval"}
    best = max(lines, key=lambda step: (lines[step]["auc"], -step))
    assert (run.folder / "checkpoints" / f"step-{best:08d}").exists()


# task: its options, and what the metrics must reach
EXAMPLES = {
    "diabetes.py:Diabetes": ((), {"r2": 0.28}),
    "multi_label.py:Topics": (("--epochs", "4"), {"f1": 0.5, "recall": 0.4, "auc": 0.7, "accuracy": 0.65}),
    "segmentation.py:Shapes": (
        ("--epochs", "3", "--set", "task_options.samples=160", "--set", "task_options.channels=4"),
        {"mean_iou": 0.3, "accuracy": 0.8},
    ),
}


@pytest.mark.parametrize("task", EXAMPLES)
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_an_example_learns(framework, task, tmp_path):
    options, least = EXAMPLES[task]
    words = ("--framework", framework, "--task", f"{ROOT}/examples/{task}", "--device", "cpu", *options)
    final = train(2, controller_of(framework, 2), *words, cwd=tmp_path).summary["final"]
    assert {name: final[name] >= value for name, value in least.items()} == dict.fromkeys(least, True), final
