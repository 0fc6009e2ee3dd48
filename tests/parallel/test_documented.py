"""The jobs that the documents show run as they stand, shortened to a few steps."""

import json
import shutil

import pytest
from documents import ROOT, can_run_here, hvdtrain_commands, named_files
from jobs import run

PAGES = ("README.md", "docs/running.md", "docs/tasks.md")
STEPS = 5


def shortened(words: list[str]) -> tuple[str, ...]:
    """Give a documented job with a few steps in place of its length; scripts stay as they are."""
    if "hvdtrain" not in words:
        return tuple(words)
    for option in ("--epochs", "--steps"):
        if option in words:
            place = words.index(option)
            words = words[:place] + words[place + 2 :]
    return (*words, "--steps", str(STEPS))


JOBS = sorted(
    {shortened(words) for page in PAGES for words in hvdtrain_commands(ROOT / page) if can_run_here(words)}
)


@pytest.fixture
def folder(tmp_path):
    """A folder as a reader has it: the examples, and the files that the documents tell to write."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    for page in PAGES:
        for name, text in named_files(ROOT / page).items():
            (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize("job", JOBS, ids=" ".join)
def test_documented_job_runs(job, folder):
    result = run(list(job), folder)
    assert result.returncode == 0, result.output[-5000:]
    summary = json.loads(next(folder.glob("runs/*/summary.json")).read_text())
    assert summary["status"] == "completed"
    assert "hvdtrain" not in job or summary["steps"] == STEPS
