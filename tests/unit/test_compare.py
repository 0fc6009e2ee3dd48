"""Runs side by side: a row for each, and what differs."""

import csv
import errno
import io
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.stored_runs import SUMMARY, evaluation, make_run, window

from hvdtrain.reporting.compare import print_csv, print_table
from hvdtrain.reporting.stored_runs import find_runs


@pytest.fixture
def shown(capsys, monkeypatch):
    """Prints the table of some runs; gives its lines."""
    monkeypatch.setenv("COLUMNS", "80")

    def lines(*folders: Path, sort: str | None = None) -> list[str]:
        print_table(folders, sort)
        printed = capsys.readouterr()
        assert printed.err == ""
        return [line.rstrip() for line in printed.out.splitlines()]

    return lines


def names(lines: list[str], count: int) -> list[str]:
    return [line.split()[0] for line in lines[2 : 2 + count]]


def test_a_row_per_run_and_what_differs_below(tmp_path, shown):
    other = {**SUMMARY, "framework": "tf", "final": {"loss": 0.25, "accuracy": 0.97}}
    other |= {"seconds": 20.0, "samples_per_second": 5432.1}
    options = "learning_rate: {}\ntask_options: {{a: 1, b: {}}}\n"
    one = make_run(tmp_path / "one", config="framework: torch\n" + options.format(0.1, 2))
    two = make_run(tmp_path / "two", summary=other, config="framework: tf\n" + options.format(0.2, "null"))
    lines = shown(one, two)
    assert [line.split() for line in (lines[0], *lines[2:4])] == [
        ["run", "accuracy", "loss", "seconds", "samples/s", "framework"],
        ["one", "0.9000", "0.2000", "8.0", "160", "torch"],
        ["two", "0.9700", "0.2500", "20.0", "5,432", "tf"],
    ]
    assert lines[4:] == [
        "in all runs: task digits, status completed, workers 2, steps 40",
        "what differs:",
        "  one  learning_rate 0.1, task_options.b 2",
        "  two  learning_rate 0.2, task_options.b null",
    ]


def test_a_run_without_a_summary_is_shown_as_far_as_its_log_goes(tmp_path, shown):
    going = make_run(
        tmp_path / "going", evaluation(5, loss=0.7, f1=0.5), window(9, seconds=4.5), summary=None
    )
    with (going / "metrics.jsonl").open("a") as file:
        file.write('{"phase": "train", "st')
    lines = shown(make_run(tmp_path / "one"), going)
    assert lines[0].split() == ["run", "f1", "accuracy", "loss", "seconds", "samples/s", "status"]
    assert lines[3].split() == ["going", "0.5000", "0.7000", "4.5", "160", "unknown"]
    assert lines[-1] == "  going  steps 9"


def test_the_config_says_which_end_of_a_metric_is_better(tmp_path, shown):
    scores = [evaluation(step, score=float(step)) for step in (1, 2)]
    run = make_run(tmp_path / "one", *scores, summary=None, config="keep_best: score:min\n")
    assert shown(run)[2].split()[:3] == ["one", "2.0000", "1.0000"]


def test_a_folder_stands_for_its_runs_and_a_summary_that_is_none_fails_no_other(tmp_path, shown):
    make_run(tmp_path / "b")
    bad = make_run(tmp_path / "a")
    (bad / "summary.json").write_text("[" * 5000)
    (tmp_path / "empty").mkdir()
    lines = shown(tmp_path, tmp_path / "b")
    assert names(lines, 2) == ["a", "b"]
    assert lines[-1].startswith("note: a: cannot read summary.json: ")


def test_runs_are_sorted_with_the_best_first_and_those_without_a_value_last(tmp_path, shown):
    finals = {
        "bad": ({"loss": float("nan")}, 8.0),
        "low": ({"loss": 0.3, "accuracy": 0.9}, 3.0),
        "high": ({"loss": 0.2, "accuracy": 0.8}, 5.0),
    }
    runs = [
        make_run(tmp_path / name, summary={**SUMMARY, "final": final, "seconds": seconds})
        for name, (final, seconds) in finals.items()
    ]
    for sort, order in {
        "loss": ["high", "low", "bad"],
        "accuracy": ["low", "high", "bad"],
        "best accuracy": ["low", "high", "bad"],
        "accuracy:min": ["high", "low", "bad"],
        "seconds": ["low", "high", "bad"],
    }.items():
        assert names(shown(*runs, sort=sort), 3) == order, sort
    lines = shown(*runs, sort="accuracy:min")
    assert lines[0].split()[:2] == ["run", "accuracy"]  # the column of the order is the first


def test_a_csv_has_all_digits_and_no_formulas(tmp_path, capsys):
    config = 'framework: torch\nlearning_rate: 0.1\ninit: "=1+1"\n'
    one = make_run(tmp_path / "one", evaluation(5, loss=0.7), config=config)
    final = {**SUMMARY, "final": {"loss": 0.123456789}}
    print_csv([one, make_run(tmp_path / "two", summary=final, config="learning_rate: 0.2\n")])
    first, second = csv.DictReader(io.StringIO(capsys.readouterr().out))
    assert (first["steps"], first["samples/s"], first["accuracy"]) == ("40", "160.0", "0.9")
    assert (first["best loss"], first["best_step loss"]) == ("0.7", "5")
    assert first["config.learning_rate"] == "0.1"
    assert first["config.init"] == "'=1+1"
    assert (second["loss"], second["accuracy"], second["config.learning_rate"]) == ("0.123456789", "", "0.2")


def test_a_folder_that_cannot_be_read_is_said_once_and_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    run, lost, closed = make_run(tmp_path / "a"), tmp_path / "lost", tmp_path / "closed"
    lost.mkdir()
    make_run(closed / "run")
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
