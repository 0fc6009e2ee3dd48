"""What a page says happened to a run: starts, resumes, changes of the workers, problems, the end."""

import json

import pytest
from support.stored_runs import SUMMARY, change, evaluation, make_run, window

from hvdtrain.tools.report.run_log import history_of, read_log


def start(folder, step=0):
    """Write what a start leaves behind."""
    with (folder / "provenance.jsonl").open("a") as file:
        file.write(json.dumps({"time": "2023-11-14T22:13:20+00:00", "step": step}) + "\n")


@pytest.mark.parametrize(
    "content", ["", "{", "[1]", '{"step": "x", "time": 3}', '{"step": 1e400}', "\x00\xff"]
)
def test_what_is_no_start_has_no_place_and_no_time(tmp_path, content):
    run = make_run(tmp_path, window(10))
    (run / "provenance.jsonl").write_text(content + "\n")
    assert {event.time for event in history_of(run, read_log(run), None)} <= {""}


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
    assert events[1].place == {"step": 20, "epoch": 2, "samples": 640, "seconds": 4}
    assert events[1].time == "2023-11-14 22:13:20 UTC"


def test_workers_that_came_and_went_are_named(tmp_path):
    joined = change(30, left=[], joined=["localhost, slot 2"], workers=2)
    run = make_run(tmp_path, window(10), change(20), joined)
    texts = [event.text for event in history_of(run, read_log(run), None)]
    assert texts == [
        "1 worker from step 21 on; left: rank 1 on h2: killed (SIGKILL); 0.5 s without training",
        "2 workers from step 31 on; joined: localhost, slot 2; 0.5 s without training",
    ]


def test_a_resume_that_a_later_one_undid_has_no_place(tmp_path):
    run = make_run(tmp_path, window(10), window(20), window(30))
    for step in (0, 40, 20, 30):
        start(run, step)
    events = history_of(run, read_log(run), None)
    assert [(event.text, event.place.get("step")) for event in events] == [
        ("training started", 0),
        ("resumed after step 40; what it trained was done again from step 21 on", None),
        ("resumed after step 20", 20),
        ("resumed after step 30", 30),
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


def test_the_steps_in_which_samples_were_skipped_are_listed(tmp_path):
    run = make_run(
        tmp_path, window(10, bad_samples=1), window(20, bad_samples=2), evaluation(20), window(30),
        {**evaluation(30), "bad_samples": 4}, window(31, bad_samples=1), {**evaluation(40), "bad_samples": 4},
    )  # fmt: skip
    events = history_of(run, read_log(run), None)
    assert [(event.kind, event.place["step"], event.text) for event in events] == [
        ("problem", 31, "4 unreadable samples skipped in the windows up to steps 10, 20, 31"),
        ("problem", 40, "8 unreadable samples skipped in evaluations at steps 30, 40"),
    ]
