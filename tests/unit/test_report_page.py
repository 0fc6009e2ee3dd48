"""The page of runs without a browser: the data behind its curves, what it says, and what it refuses."""

import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from support.stored_runs import SUMMARY, change, evaluation, make_run, window

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
