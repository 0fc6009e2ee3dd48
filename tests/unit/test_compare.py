"""Runs side by side: a row for each, and what differs."""

import json
import os
from pathlib import Path

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


def test_one_run_is_shown_with_all_its_facts(make, shown):
    facts = "framework torch, task digits, status completed, workers 2, steps 1,350"
    assert shown(make("one", SUMMARY))[3:] == [facts]


def test_nine_runs_fit_into_80_columns(make, shown):
    configs = [f"learning_rate: 0.{i}\nseed: {i}\n" for i in range(9)]
    lines = shown(*(make(f"run-{i}", SUMMARY, config) for i, config in enumerate(configs)))
    assert len(lines) == 2 + 9 + 1 + 1 + 9
    assert max(map(len, [*lines[:11], *lines[12:]])) <= 80
    assert lines[-1] == "  run-8  learning_rate 0.8, seed 8"


def test_runs_of_one_name_are_told_apart_by_their_paths(make, shown):
    folders = [make("a/run", SUMMARY), make("b/run", SUMMARY)]
    os.chdir(folders[0].parent.parent)
    lines = shown(Path("a/run"), Path("b/run"))
    assert [line.split()[0] for line in lines[2:4]] == ["a/run", "b/run"]


def test_a_metric_that_one_run_lacks_is_left_blank(make, shown):
    failed = {**SUMMARY, "status": "failed", "final": {}}
    lines = shown(make("one", SUMMARY), make("two", failed))
    assert lines[2].split() == ["one", "0.9800", "0.1000", "12.3", "5,432", "completed"]
    assert lines[3].split() == ["two", "12.3", "5,432", "failed"]


LOG = """{"phase": "eval", "step": 5, "epoch": 1.0, "loss": 0.7, "f1": 0.5, "learning_rate": 0.1}
{"phase": "train", "step": 9, "epoch": 1.5, "loss": 0.3, "learning_rate": 0.1, "workers": 2, "seconds": 4.5}
{"phase": "train", "st"""


def test_a_run_without_a_summary_is_shown_as_far_as_its_log_goes(make, shown):
    going = make("going", None, "framework: torch\ntask: digits\n", LOG)
    lines = shown(make("one", SUMMARY), going)
    assert lines[0].split() == ["run", "f1", "accuracy", "loss", "seconds", "samples/s", "status"]
    assert lines[3].split() == ["going", "0.5000", "0.7000", "4.5", "unfinished"]
    assert lines[-1] == "  going  steps 9"


def test_what_is_no_run_is_left_out(make, shown, tmp_path):
    lines = shown(make("one", SUMMARY), tmp_path / "missing")
    assert lines[-1] == f"note: {tmp_path / 'missing'}: left out, it holds no run"


def test_without_any_run_it_is_an_error(tmp_path):
    with pytest.raises(UsageError, match=rf"{tmp_path}: no run \(none of summary\.json, config\.yaml"):
        print_table([tmp_path])


@pytest.mark.parametrize("text", ["{", "", "[]", "{}", '{"framework": "torch"}', "[" * 5000])
def test_a_summary_that_is_none_is_named_and_fails_no_other(make, shown, text):
    bad = make("bad", SUMMARY)
    (bad / "summary.json").write_text(text)
    lines = shown(make("one", SUMMARY), bad)
    assert lines[2].split()[:3] == ["one", "0.9800", "0.1000"]
    assert lines[3].split() == ["bad", "unfinished"]
    assert lines[-1].startswith("note: bad: cannot read summary.json: ")


def test_a_pipe_in_the_place_of_a_summary_is_not_waited_for(make, shown):
    bad = make("bad", None, "seed: 1\n")
    os.mkfifo(bad / "summary.json")
    assert "note: bad: cannot read summary.json: summary.json is not a regular file" in shown(bad)


def test_names_are_no_markup_and_do_not_reach_the_terminals_controls(make, shown):
    hostile = {**SUMMARY, "task": "a[b].py:\x1b[31mX[/x]", "status": "[red]", "final": {"[/y]\x07": 1.0}}
    lines = shown(make("[z]", hostile))
    assert lines[0].split()[:2] == ["run", "[/y]?"]
    assert lines[2].split()[0] == "[z]"
    assert lines[3] == "framework torch, task a[b].py:X[/x], status [red], workers 2, steps 1,350"


def test_values_of_other_types_are_shown_as_they_are(make, shown):
    odd = {**SUMMARY, "seconds": "long", "samples_per_second": None, "final": {"loss": float("nan")}}
    assert shown(make("odd", odd))[2].split() == ["odd", "nan", "long"]
