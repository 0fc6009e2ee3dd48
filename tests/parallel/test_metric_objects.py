"""Objects of torchmetrics and Keras: over workers as one object that has seen all samples."""

import functools
import json
from pathlib import Path

import pytest
from metric_object_tasks import SAMPLES, Answers
from support.documents import ROOT, named_files
from support.jobs import FRAMEWORKS, temporary_folder
from support.pool import Key, call, controller_of, train

CASES = Path(__file__).with_name("metric_object_cases.py")
TASKS = Path(__file__).with_name("metric_object_tasks.py")
NAMES = ["Answers"]


@functools.cache
def evaluated(framework, workers):
    """Return the metrics of the tasks; and what one object gives for the rows that rank 0 gathered."""
    key = Key(framework, controller_of(framework, workers), workers)
    done = call(key, f"{CASES}:evaluated", temporary_folder(), framework=framework, tasks=NAMES)
    found = [of_rank for of_rank, _ in done.values]
    assert all(of_rank == found[0] for of_rank in found)
    return done.values[0]


@pytest.mark.parametrize(("framework", "workers"), [("torch", 2), ("tf", 2)])
def test_they_are_those_of_one_object_with_all_samples(framework, workers):
    found, expected = evaluated(framework, workers)
    for name in NAMES:
        assert found[name]["rows"] == SAMPLES
        assert {key: found[name][key] for key in expected[name]} == pytest.approx(expected[name], rel=1e-6)
        assert list(found["Answers"]) == ["loss", *Answers.metrics]


def test_training_keeps_the_best_by_an_object(tmp_path):
    words = ["--framework", "torch", "--task", f"{TASKS}:Answers", "--keep-best", "auroc"]
    run = train(2, "mpi", *words, "--device", "cpu", cwd=tmp_path)
    lines = {line["step"]: line for line in run.metrics if line["phase"] == "eval"}
    best = max(lines, key=lambda step: (lines[step]["auroc"], -step))
    assert (run.folder / "checkpoints" / f"step-{best:08d}").exists()


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_the_task_of_the_documents_trains(framework, tmp_path):
    (tmp_path / "answers.py").write_text(named_files(ROOT / "docs" / "metrics.md")["answers.py"])
    words = ["--framework", framework, "--task", "answers.py:Answers", "--device", "cpu", "--run-dir", "run"]
    case = "support.cases:command_line"
    assert call(Key(framework, controller_of(framework, 2), 2), case, tmp_path, words=words).values == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert 0.65 < summary["final"]["auc"] < 1
