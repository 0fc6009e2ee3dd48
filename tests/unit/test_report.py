"""What a run shows."""

import json

import pytest
from support.watching import summary


def test_lines_begin_with_the_first_window_and_then_come_every_few_seconds(plain, clock):
    plain.report.on_start(100, 0)
    shown = []
    for step, seconds in [(10, 0.0), (20, 1.0), (30, 4.9), (40, 5.0), (50, 9.9), (60, 10.5)]:
        clock.seconds = 100.0 + seconds
        before = len(plain.lines)
        plain.log(step)
        shown += [step] * (len(plain.lines) - before)
    assert shown == [10, 40, 60]


def test_plain_text_holds_no_control_characters(plain):
    plain.report.say("the plan [with brackets]: 1,797 samples")
    plain.report.note("careful")
    plain.report.on_start(1, 0)
    plain.log(1)
    plain.report.on_end(summary())
    text = plain.file.getvalue()
    assert text.isascii()
    assert "\x1b" not in text
    assert "the plan [with brackets]: 1,797 samples\nnote: careful\n" in text


def test_the_result_is_short(plain):
    plain.report.on_end(summary())
    assert plain.lines == [
        "done: loss 0.1250, accuracy 0.9750; 1,234 steps in 12.2 s, 5,000 samples/s",
        "run directory: runs/x",
        "checkpoint: none",
    ]


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_did_not_end_well_is_not_called_done(plain, tmp_path, status):
    plain.report.on_end(summary(status=status, error="the loss is nan"))
    assert plain.lines == []
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["status"], written["error"]) == (status, "the loss is nan")
