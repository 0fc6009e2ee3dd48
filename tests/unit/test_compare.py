"""Finished runs side by side."""

import json

import pytest

from hvdtrain.errors import UsageError
from hvdtrain.reporting.compare import print_table

SUMMARY = {
    "status": "completed",
    "framework": "torch",
    "task": "digits",
    "workers": 2,
    "steps": 1350,
    "samples": 43110,
    "epochs": 15.0,
    "seconds": 12.34,
    "samples_per_second": 5432.1,
    "final": {"loss": 0.1, "accuracy": 0.98},
    "run_dir": "runs/x",
}


@pytest.fixture
def table(tmp_path, capsys, monkeypatch):
    """Prints the table of some summaries; gives its rows as lists of cells."""
    monkeypatch.setenv("COLUMNS", "120")

    def rows(*summaries: dict) -> list[list[str]]:
        folders = []
        for i, summary in enumerate(summaries):
            folders.append(tmp_path / str(i))
            folders[-1].mkdir()
            (folders[-1] / "summary.json").write_text(json.dumps(summary))
        print_table(folders)
        lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line or "┃" in line]
        return [[cell.strip() for cell in line.replace("┃", "│").split("│")[1:-1]] for line in lines]

    return rows


def test_two_runs_stand_side_by_side(table):
    other = {**SUMMARY, "framework": "tf", "final": {"loss": 0.25, "accuracy": 0.97}, "seconds": 20.0}
    assert table(SUMMARY, other) == [
        ["", "torch", "tf"],
        ["accuracy", "0.9800", "0.9700"],
        ["loss", "0.1000", "0.2500"],
        ["seconds", "12.3", "20.0"],
        ["samples/s", "5,432", "5,432"],
        ["steps", "1,350", "1,350"],
        ["workers", "2", "2"],
        ["status", "completed", "completed"],
        ["task", "digits", "digits"],
    ]


def test_a_metric_that_one_run_lacks_is_left_blank(table):
    failed = {**SUMMARY, "status": "failed", "final": {}}
    rows = {name: cells for name, *cells in table(SUMMARY, failed)}
    assert (rows["accuracy"], rows["status"]) == (["0.9800", ""], ["completed", "failed"])


def test_a_directory_without_summary_is_named(tmp_path):
    with pytest.raises(UsageError, match=rf"{tmp_path} holds no summary\.json\nName the directory of a run"):
        print_table([tmp_path])


@pytest.mark.parametrize("text", ["{", "", "[]", "{}", '{"framework": "torch"}'])
def test_a_summary_that_is_none_is_named(tmp_path, text):
    (tmp_path / "summary.json").write_text(text)
    with pytest.raises(UsageError, match=rf"cannot read {tmp_path}/summary\.json: "):
        print_table([tmp_path])
