"""What a page says happened to a run: starts, resumes, changes of the workers, problems, the end."""

import json

from support.stored_runs import SUMMARY, change, make_run, window

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
