"""Runs side by side: the page without a browser and its data, and the table with a row for each."""

import csv
import errno
import io
import json
import os
import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from support.stored_runs import SUMMARY, change, evaluation, make_run, window

from hvdtrain.reporting.compare import print_csv, print_table
from hvdtrain.reporting.stored_runs import find_runs
from hvdtrain.tools.report.page import write_report
from hvdtrain.tools.report.run_log import history_of, read_log


@pytest.fixture
def write(tmp_path):
    """Writes the page of some runs; gives its text, without its script."""

    def page(*runs, verified=True):
        write_report(list(runs), tmp_path / "page.html", verified)
        return (tmp_path / "page.html").read_text().partition('<script type="application/json"')[0]

    return page


def words(page):
    """Give the text of a page, without its marks."""
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", page))


def usual(folder, count=40, **options):
    records = [window(step) for step in range(1, count + 1)]
    evaluations = [evaluation(step) for step in range(10, count + 1, 10)]
    return make_run(folder, *records, *evaluations, **options)


def test_a_page_names_results_differences_and_config(write, tmp_path):
    one = usual(tmp_path / "one", config="# python -m hvdtrain --seed 1\nseed: 1\ntask_options: {a: x}\n")
    two = usual(tmp_path / "two", config="seed: 2\n", summary=None)
    text = words(write(one, two))
    assert "one completed torch digits" in text
    assert "0.9750 at step 40" in text
    assert "seed 1 2" in text
    assert "task_options.a x unknown" in text
    assert "comment python -m hvdtrain --seed 1" in text
    assert "two unknown" in text
    said = write_report([tmp_path, tmp_path / "none"], tmp_path / "page.html", verified=True)
    assert re.search(r"page\.html: 2 runs, 1\.\d MB", said), "a folder stands for its runs"
    assert f"note: {tmp_path / 'none'}: left out, it holds no run" in said


def test_a_run_that_cannot_be_read_is_said(write, tmp_path):
    run = usual(tmp_path / "run", config="[")
    (run / "summary.json").write_text("{")
    (run / "metrics.jsonl").unlink()
    (run / "metrics.jsonl").mkdir()
    text = words(write(run))
    for word in ("cannot read summary.json", "config.yaml", "its log cannot be read", "no numbers yet"):
        assert word in text


def test_checkpoints_are_verified(write, train, tmp_path, monkeypatch):
    train(epochs=2)
    run = tmp_path / "run"
    first, second = sorted((run / "checkpoints").iterdir())
    content = bytearray((first / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (first / "model.safetensors").write_bytes(content)
    text = words(write(run))
    assert f"{second.name} (best loss, accuracy) verified" in text
    assert f"{first.name} damaged: the content of model.safetensors has changed" in text
    assert f"{first.name} not checked" in words(write(run, verified=False))
    assert sorted((run / "checkpoints").iterdir()) == [first, second], "nothing is quarantined"
    monkeypatch.setattr("hvdtrain.tools.report.page._VERIFIED", 1)
    text = words(write(run))
    assert f"{second.name} (best loss, accuracy) verified" in text
    assert f"{first.name} not checked" in text, "only the newest ones are read"


class Marks(HTMLParser):
    """The elements of a page and what it would fetch; scripts are text that only their end tag ends."""

    def __init__(self, page):
        super().__init__()
        self.names, self.fetched, self.handlers = {}, [], []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.names[tag] = self.names.get(tag, 0) + 1
        self.fetched += [value for name, value in attrs if name in ("src", "href") and "//" in (value or "")]
        self.handlers += [name for name, _ in attrs if name.startswith("on")]


def test_a_strangers_run_runs_no_script_and_nothing_is_fetched(tmp_path):
    hostile = "<img src=x onerror=window.hacked=1>{{7*7}}@step $name"
    script = "</script><script>window.hacked=1</script><svg onload=window.hacked=1>"
    summary = {**SUMMARY, "status": script, "task": script, "error": script, "final": {script: 1.0}}
    names = {script: 0.5, hostile: 0.5, "__proto__": 1.0}
    changed = change(20, left=[script], cause=script)
    records = [window(10, **names), window(20, **names), evaluation(20, **names), changed]
    config = f"# {script}\ntask: {script!r}\n{hostile!r}: {script!r}\n"
    make_run(tmp_path / "usual", *records[:1])
    make_run(tmp_path / hostile, *records, summary=summary, config=config)
    found = []
    for name in ("usual", hostile):
        write_report([tmp_path / name], tmp_path / "page.html", False)
        found.append(Marks((tmp_path / "page.html").read_text()))
    assert hostile.replace("<", "&lt;").replace(">", "&gt;") in (tmp_path / "page.html").read_text()
    assert found[1].names["script"] == found[0].names["script"]
    assert "img" not in found[1].names
    assert found[1].fetched == found[1].handlers == []


def test_starts_changes_of_the_workers_and_what_a_summary_says_are_listed_in_order(tmp_path):
    joined = change(30, left=[], joined=["localhost, slot 2"], workers=2)
    run = make_run(tmp_path, window(10), window(20), change(25), joined, window(40))
    starts = [{"time": "2023-11-14T22:13:20+00:00", "step": step} for step in (0, 20)]
    (run / "provenance.jsonl").write_text("".join(json.dumps(one) + "\n" for one in starts))
    summary = {**SUMMARY, "status": "failed", "bad_samples": 3, "error": "the loss is NaN"}
    events = history_of(run, read_log(run), summary)
    assert [event.text for event in events] == [
        "training started",
        "resumed after step 20",
        "1 worker from step 26 on; left: rank 1 on h2: killed (SIGKILL); 0.5 s without training",
        "2 workers from step 31 on; joined: localhost, slot 2; 0.5 s without training",
        "3 unreadable samples skipped since the last start",
        "failed after 40 steps: the loss is NaN",
    ]
    assert (events[1].step, events[1].time) == (20, "2023-11-14 22:13:20 UTC")


def test_a_curve_has_the_numbers_of_the_log_on_every_axis(tmp_path):
    log = read_log(make_run(tmp_path, window(10, slowest_rank=1), evaluation(10), window(20)))
    curve = log.curves["train", "loss"]
    assert curve.values.tolist() == [1 / 10, 1 / 20]
    assert {name: values.tolist() for name, values in curve.axes.items()} == {
        "step": [10, 20], "epoch": [1, 2], "samples": [320, 640], "seconds": [2, 4],
    }  # fmt: skip
    assert log.curves["eval", "accuracy"].values.tolist() == [0.9]
    assert log.curves["train", "slowest_rank"].axes["step"].tolist() == [10]


@pytest.mark.parametrize("value", ["null", "NaN", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_a_gap(tmp_path, value):
    run = make_run(tmp_path, window(10), window(20), window(30))
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 0.05', f'"loss": {value}'))
    log = read_log(run)
    assert np.isnan(log.curves["train", "loss"].values).tolist() == [False, True, False]


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
