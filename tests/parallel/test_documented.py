"""The jobs that the documents show run, shortened to a few steps; some pages run in order, as they stand."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from support import pool
from support.documents import ROOT, can_run_here, hvdtrain_commands, named_files, shortened
from support.jobs import Result, run
from support.serving import trained

PAGES = (
    "README.md",
    *(f"docs/{name}.md" for name in ("running", "run-output", "failures", "tasks", "data", "augmentation",
                                     "losses", "metrics", "training-steps", "state")),
)  # fmt: skip
STEPS = 5

JOBS = sorted(
    {
        shortened(words, STEPS)
        for page in PAGES
        for words in hvdtrain_commands(ROOT / page)
        if can_run_here(words)
    }
)


# Each way to start a job is launched once, as each script is; what else a command shows, its options and
# tasks, a pool of the same launcher and number of workers shows as well.
LAUNCHED = {words[: words.index("hvdtrain")]: words for words in JOBS if "hvdtrain" in words}.values()


def write_files(page: Path, folder: Path) -> None:
    """Write the files that a page says to write."""
    for name, text in named_files(page).items():
        (folder / name).write_text(text, encoding="utf-8")


@pytest.fixture
def folder(tmp_path):
    """A folder as a reader has it: the examples, and the files that the documents tell to write."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for page in PAGES:
        write_files(ROOT / page, tmp_path)
    return tmp_path


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_documented_job_runs(job, folder):
    is_launched = "hvdtrain" not in job or job in LAUNCHED
    result = run(list(job), folder) if is_launched else pool.documented(job, folder)
    assert result.returncode == 0, result.output[-5000:]
    summary = json.loads(next(folder.glob("runs/*/summary.json")).read_text())
    assert summary["status"] == "completed"
    assert "hvdtrain" not in job or summary["steps"] == STEPS


def run_page(page: str, folder: Path) -> list[Result]:
    """Run a page's commands in a folder; all of them must end well.

    They run in pools, but the first that is no job, and those that need both frameworks: such a process says
    nothing but what it has to.
    """
    results: list[Result] = []
    for words in hvdtrain_commands(ROOT / "docs" / page):
        is_first = words[3] in ("evaluate", "import") and not results
        is_alone = is_first or any("keras" in word for word in words)
        results.append(run(words, folder) if is_alone else pool.documented(tuple(words), folder))
        assert results[-1].returncode == 0, f"{words}\n{results[-1].output[-3000:]}"
        assert not (is_alone and results[-1].stderr), results[-1].stderr
    return results


def test_the_page_on_serving(tmp_path):
    shutil.copytree(trained("torch").folder, tmp_path / "runs" / "digits")
    assert len(run_page("serving.md", tmp_path)) == 8
    assert (tmp_path / "digits.onnx").is_file()
    assert np.load(tmp_path / "digits.npz")["outputs"].shape == (359, 10)
    assert (tmp_path / "digits.parquet").is_file()
    assert (tmp_path / "runs" / "imported" / "summary.json").is_file()
    assert len((tmp_path / "runs" / "digits" / "evaluations.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("page", ["recipes.md", "recipes-text.md"])
def test_the_recipes(page, tmp_path):
    write_files(ROOT / "docs" / page, tmp_path)
    output = ""
    for words in hvdtrain_commands(ROOT / "docs" / page):
        short = words if "export" in words else shortened(words, 5)
        result = pool.documented(tuple(short), tmp_path) if "hvdtrain" in words else run(words, tmp_path)
        output = result.output
        assert result.returncode == 0, f"{words}\n{output[-3000:]}"
    assert page != "recipes.md" or "accuracy 0." in output


def test_the_page_on_checkpoints(tmp_path):
    results = run_page("checkpoints.md", tmp_path)
    assert len(results) == 4
    assert "starts from    runs/digits/checkpoints/step-00000045: step 45, sample 2,876" in results[1].output
    assert "changed        framework torch -> tf, epochs 4 -> 5, workers 2 -> 1" in results[2].output
    metrics = (tmp_path / "runs" / "digits" / "metrics.jsonl").read_text().splitlines()
    evaluated = [line["epoch"] for line in map(json.loads, metrics) if line["phase"] == "eval"]
    assert [round(epoch) for epoch in evaluated] == [1, 2, 3, 4, 5]
    assert (tmp_path / "runs" / "tuned" / "summary.json").is_file()


def test_the_tutorial(tmp_path):
    page = ROOT / "docs" / "tutorial.md"
    write_files(page, tmp_path)
    assert run(["python", "make_table.py"], tmp_path).returncode == 0
    for words in hvdtrain_commands(page):
        if "host1:8,host2:8" not in words:
            in_pool = "hvdtrain" in words and "prove" not in words
            result = pool.documented(tuple(words), tmp_path) if in_pool else run(words, tmp_path)
            assert result.returncode == 0, f"{words}\n{result.output[-3000:]}"
    assert json.loads((tmp_path / "runs" / "wine" / "summary.json").read_text())["epochs"] == 16
    evaluated = json.loads((tmp_path / "runs" / "wine" / "evaluations.jsonl").read_text())
    assert evaluated["accuracy"] > 0.9
    assert np.load(tmp_path / "wine.npz")["outputs"].shape == (45, 3)
    assert (tmp_path / f"runs/wine/exports/wine-step-{evaluated['step']:08d}.onnx").is_file()
    assert (tmp_path / "report.html").is_file()
