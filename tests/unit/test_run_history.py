"""What a page says happened to a run: starts, resumes, changes of the workers, problems, the end."""

import json

import numpy as np
import pytest
from support.stored_runs import SUMMARY, change, evaluation, make_run, window

from hvdtrain.tools.report.run_log import history_of, read_log


def start(folder, step=0):
    """Write what a start leaves behind."""
    with (folder / "provenance.jsonl").open("a") as file:
        file.write(json.dumps({"time": "2023-11-14T22:13:20+00:00", "step": step}) + "\n")


def test_a_resume_has_its_place(tmp_path):
    run = make_run(tmp_path, window(10), window(20), window(40))
    start(run)
    start(run, 20)
    events = history_of(run, read_log(run), SUMMARY)
    assert [(event.kind, event.text) for event in events] == [
        ("started", "training started"),
        ("resumed", "resumed after step 20"),
        ("ended", "completed after 40 steps"),
    ]
    assert [event.step for event in events] == [0, 20, 40]
    assert events[1].time == "2023-11-14 22:13:20 UTC"


def test_workers_that_came_and_went_are_named(tmp_path):
    joined = change(30, left=[], joined=["localhost, slot 2"], workers=2)
    run = make_run(tmp_path, window(10), change(20), joined)
    texts = [event.text for event in history_of(run, read_log(run), None)]
    assert texts == [
        "1 worker from step 21 on; left: rank 1 on h2: killed (SIGKILL); 0.5 s without training",
        "2 workers from step 31 on; joined: localhost, slot 2; 0.5 s without training",
    ]


def test_what_a_summary_says_is_listed(tmp_path):
    summary = {
        **SUMMARY, "status": "failed", "bad_samples": 3, "failed_saves": 1, "save_error": "disk full",
        "stopped_early": "loss has not improved", "error": "the loss is NaN",
    }  # fmt: skip
    run = make_run(tmp_path, window(10))
    texts = [event.text for event in history_of(run, read_log(run), summary)]
    assert texts == [
        "3 unreadable samples skipped since the last start",
        "1 checkpoint could not be written",
        "disk full",
        "stopped early: loss has not improved",
        "failed after 40 steps: the loss is NaN",
    ]


def test_a_curve_has_the_numbers_of_the_log_on_every_axis(tmp_path):
    log = read_log(make_run(tmp_path, window(10), evaluation(10), window(20)))
    curve = log.curves["train", "loss"]
    assert curve.values.tolist() == [1 / 10, 1 / 20]
    assert {name: values.tolist() for name, values in curve.axes.items()} == {
        "step": [10, 20], "epoch": [1, 2], "samples": [320, 640], "seconds": [2, 4],
    }  # fmt: skip
    assert log.curves["eval", "accuracy"].values.tolist() == [0.9]


def test_a_name_that_some_windows_lack_has_no_gap_there(tmp_path):
    log = read_log(make_run(tmp_path, window(10, slowest_rank=1), window(20), window(30, slowest_rank=0)))
    curve = log.curves["train", "slowest_rank"]
    assert curve.axes["step"].tolist() == [10, 30]
    assert curve.values.tolist() == [1, 0]


@pytest.mark.parametrize("value", ["null", "NaN", "1" + "0" * 400])
def test_a_number_that_is_not_finite_is_a_gap(tmp_path, value):
    run = make_run(tmp_path, window(10), window(20), window(30))
    path = run / "metrics.jsonl"
    path.write_text(path.read_text().replace('"loss": 0.05', f'"loss": {value}'))
    log = read_log(run)
    assert np.isnan(log.curves["train", "loss"].values).tolist() == [False, True, False]
