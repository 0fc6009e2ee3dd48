"""Runs side by side: a row for each, and what differs."""

import csv
import errno
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from hvdtrain.reporting.compare import print_csv, print_table
from hvdtrain.reporting.stored_runs import find_runs

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
def make(tmp_path):
    """Makes a run directory with these files; gives its path."""

    def run(name: str, summary: dict | None = None, config: str = "", log: str = "") -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        if summary is not None:
            (folder / "summary.json").write_text(json.dumps(summary))
        if config:
            (folder / "config.yaml").write_text(config)
        if log:
            (folder / "metrics.jsonl").write_text(log)
        return folder

    return run


@pytest.fixture
def shown(capsys, monkeypatch):
    """Prints the table of some runs; gives its lines."""
    monkeypatch.setenv("COLUMNS", "80")

    def lines(*folders: Path) -> list[str]:
        print_table(folders)
        printed = capsys.readouterr()
        assert printed.err == ""
        return [line.rstrip() for line in printed.out.splitlines()]

    return lines


def test_a_row_per_run_and_what_differs_below(make, shown):
    other = {**SUMMARY, "framework": "tf", "final": {"loss": 0.25, "accuracy": 0.97}, "seconds": 20.0}
    one = make("one", SUMMARY, "framework: torch\nlearning_rate: 0.1\ntask_options: {a: 1, b: 2}\n")
    two = make("two", other, "framework: tf\nlearning_rate: 0.2\ntask_options: {a: 1, b: null}\n")
    lines = shown(one, two)
    assert [line.split() for line in (lines[0], *lines[2:4])] == [
        ["run", "accuracy", "loss", "seconds", "samples/s", "framework"],
        ["one", "0.9800", "0.1000", "12.3", "5,432", "torch"],
        ["two", "0.9700", "0.2500", "20.0", "5,432", "tf"],
    ]
    assert lines[4:] == [
        "in all runs: task digits, status completed, workers 2, steps 1,350",
        "what differs:",
        "  one  learning_rate 0.1, task_options.b 2",
        "  two  learning_rate 0.2, task_options.b null",
    ]


LOG = """{"phase": "eval", "step": 5, "epoch": 1.0, "loss": 0.7, "f1": 0.5, "learning_rate": 0.1}
{"phase": "train", "step": 9, "epoch": 1.5, "loss": 0.3, "learning_rate": 0.1, "workers": 2, "seconds": 4.5}
{"phase": "train", "st"""


def test_a_run_without_a_summary_is_shown_as_far_as_its_log_goes(make, shown):
    going = make("going", None, "framework: torch\ntask: digits\n", LOG)
    lines = shown(make("one", SUMMARY), going)
    assert lines[0].split() == ["run", "f1", "accuracy", "loss", "seconds", "samples/s", "status"]
    assert lines[3].split() == ["going", "0.5000", "0.7000", "4.5", "unknown"]
    assert lines[-1] == "  going  steps 9"


def test_the_config_says_which_end_of_a_metric_is_better(make, shown):
    line = '{{"phase": "eval", "step": {0}, "epoch": 1.0, "score": {0}.0, "learning_rate": 0.1}}\n'
    log = line.format(1) + line.format(2)
    run = make("one", None, "keep_best: score:min\n", log)
    assert shown(run)[2].split()[:3] == ["one", "2.0000", "1.0000"]


def test_a_summary_that_is_none_is_named_and_fails_no_other(make, shown):
    bad = make("bad", SUMMARY)
    (bad / "summary.json").write_text("[" * 5000)
    lines = shown(make("one", SUMMARY), bad)
    assert [line.split()[0] for line in lines[2:4]] == ["one", "bad"]
    assert lines[-1].startswith("note: bad: cannot read summary.json: ")


def test_a_folder_stands_for_the_runs_in_it(make, shown, tmp_path):
    make("runs/b", SUMMARY)
    make("runs/a", SUMMARY)
    (tmp_path / "runs" / "empty").mkdir()
    lines = shown(tmp_path / "runs", tmp_path / "runs" / "b")
    assert [line.split()[0] for line in lines[2:4]] == ["a", "b"]


def sorted_names(capsys, sort: str, *folders: Path) -> list[str]:
    print_table(folders, sort)
    return [line.split()[0] for line in capsys.readouterr().out.splitlines()[2 : 2 + len(folders)]]


def test_runs_are_sorted_with_the_best_first_and_those_without_a_value_last(make, capsys):
    bad = make("bad", {**SUMMARY, "final": {"loss": float("nan")}})
    low = make("low", {**SUMMARY, "final": {"loss": 0.3, "accuracy": 0.9}, "seconds": 3.0})
    high = make("high", {**SUMMARY, "final": {"loss": 0.2, "accuracy": 0.8}, "seconds": 5.0})
    runs = [bad, low, high]
    assert sorted_names(capsys, "loss", *runs) == ["high", "low", "bad"]
    assert sorted_names(capsys, "accuracy", *runs) == ["low", "high", "bad"]
    assert sorted_names(capsys, "best accuracy", *runs) == ["low", "high", "bad"]
    assert sorted_names(capsys, "accuracy:min", *runs) == ["high", "low", "bad"]
    assert sorted_names(capsys, "seconds", *runs) == ["low", "high", "bad"]
    print_table(runs, "accuracy:min")
    assert capsys.readouterr().out.split()[:2] == ["run", "accuracy"]  # the column of the order is the first


def test_a_csv_has_all_digits_and_no_formulas(make, capsys):
    one = make("one", SUMMARY, 'framework: torch\nlearning_rate: 0.1\ninit: "=1+1"\n', LOG)
    print_csv([one, make("two", {**SUMMARY, "final": {"loss": 0.123456789}}, "learning_rate: 0.2\n")])
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (first["steps"], first["samples/s"], first["accuracy"]) == ("1350", "5432.1", "0.98")
    assert (first["best loss"], first["best_step loss"]) == ("0.7", "5")
    assert first["config.learning_rate"] == "0.1"
    assert first["config.init"] == "'=1+1"
    assert (second["loss"], second["accuracy"], second["config.learning_rate"]) == ("0.123456789", "", "0.2")


def test_a_folder_that_cannot_be_read_is_said_once_and_is_not_taken_for_an_empty_one(
    make, tmp_path, monkeypatch
):
    run, lost, closed = make("a", SUMMARY), tmp_path / "lost", make("closed/run", SUMMARY).parent
    lost.mkdir()
    iterdir, access = Path.iterdir, os.access

    def read(path: Path) -> Iterator[Path]:
        if path == lost:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return iterdir(path)

    (closed / "summary.json").write_text("{}")
    monkeypatch.setattr(Path, "iterdir", read)
    monkeypatch.setattr(os, "access", lambda path, *rest: closed not in path.parents and access(path, *rest))
    found, notes = find_runs([run, lost, closed])
    assert found == [run]
    assert [note.split(". ")[0].rstrip(".") for note in notes] == [
        f"{lost}: left out, it cannot be read: {os.strerror(errno.ESTALE)}",
        f"{closed}: left out, it cannot be read: {os.strerror(errno.EACCES)}",
    ]
