"""The jobs that the documents show run as they stand, shortened to a few steps."""

import json
import shutil
from pathlib import Path

import pytest
from support import pool
from support.documents import ROOT, can_run_here, hvdtrain_commands, named_files, shortened
from support.jobs import Result, run

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


def way_to_start(words: tuple[str, ...]) -> tuple[str, ...]:
    """Return what stands before the job's own words."""
    return words[: words.index("hvdtrain")]


# Each way to start a job is launched once, as each script is; what else a command shows, its options and
# tasks, a pool of the same launcher and number of workers shows as well.
LAUNCHED = {way_to_start(words): words for words in JOBS if "hvdtrain" in words}.values()


@pytest.fixture
def folder(tmp_path):
    """A folder as a reader has it: the examples, and the files that the documents tell to write."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for page in PAGES:
        for name, text in named_files(ROOT / page).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def done(job: tuple[str, ...], folder: Path) -> Result:
    """Run a job, in a pool if another test launches one in the same way."""
    if "hvdtrain" not in job or job in LAUNCHED:
        return run(list(job), folder)
    return pool.documented(job, folder)


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_documented_job_runs(job, folder):
    result = done(job, folder)
    assert result.returncode == 0, result.output[-5000:]
    summary = json.loads(next(folder.glob("runs/*/summary.json")).read_text())
    assert summary["status"] == "completed"
    assert "hvdtrain" not in job or summary["steps"] == STEPS
