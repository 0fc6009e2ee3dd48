"""What a run shows."""

import json
import re

import click
import pytest
from support.watching import MEANS, METRICS, Watched, step_info, summary

from hvdtrain.reporting.report import SilentReport


def test_lines_begin_with_the_first_window_and_then_come_every_few_seconds(plain, clock):
    plain.report.on_start(100, 0)
    shown = []
    for step, seconds in [(10, 0.0), (20, 1.0), (30, 4.9), (40, 5.0), (50, 9.9), (60, 10.5)]:
        clock.seconds = 100.0 + seconds
        before = len(plain.lines)
        plain.log(step)
        shown += [step] * (len(plain.lines) - before)
    assert shown == [10, 40, 60]


def test_the_last_window_is_always_a_line(plain):
    plain.report.on_start(20, 0)
    plain.log(10)
    plain.log(20)
    assert [line.split()[2] for line in plain.lines] == ["10/20", "20/20"]


def test_a_line_says_what_matters(plain):
    plain.report.on_start(20, 0)
    plain.log(6)
    assert plain.lines == [
        "train step      6/20  epoch   1.50  loss 0.5000  accuracy 0.7500  lr 0.0312  2,000 samples/s"
    ]


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


def test_an_evaluation_is_a_line_of_its_own(plain):
    plain.report.on_start(20, 0)
    plain.step(6)
    plain.report.on_evaluation(step_info(6), MEANS, 3000.0)
    assert plain.lines == ["eval  step      6  epoch   1.50  loss 0.5000  accuracy 0.7500"]


def test_the_bar_shows_steps_values_and_time_left(live, clock):
    live.report.on_start(3, 0)
    clock.seconds += 1
    live.log(2)
    live.report.close()
    text = live.file.getvalue()
    assert "2/3" in text
    assert "loss 0.5000  accuracy 0.7500  lr 0.0312  2,000 samples/s" in text
    assert "left" in text


def test_the_bar_ends_at_the_last_step_however_fast_it_came(live):
    live.report.on_start(3, 0)
    for step in (1, 2, 3):
        live.log(step)
    live.report.on_end(summary())
    bars = [line for line in live.file.getvalue().replace("\r", "\n").splitlines() if "/3" in line]
    assert "3/3" in bars[-1]
    assert "loss 0.5000" in bars[-1]


def bars(watched: Watched) -> list[str]:
    """Return what the bar showed, one line for each time."""
    return click.unstyle(watched.file.getvalue()).replace("\r", "\n").splitlines()


@pytest.mark.parametrize("width", [60, 80, 100, 120])
def test_on_a_narrow_terminal_the_bar_keeps_steps_and_time_left(tmp_path, clock, width):
    narrow = Watched(tmp_path, terminal=True, width=width)
    narrow.report.on_start(8000, 0)
    clock.seconds += 1
    narrow.log(467)
    narrow.report.close()
    assert all(len(line) <= width for line in bars(narrow))
    last = [line for line in bars(narrow) if "467/8000" in line][-1]
    assert re.search(r"train [━╸╺]+ +467/8000 \S+ left epoch 116.8  loss 0", last)
    assert "…" in last


def test_the_bar_says_that_the_run_evaluates_until_its_next_step(live, clock):
    live.report.on_start(8, 0)
    live.log(1)
    live.report.status("evaluating at step 1")
    clock.seconds += 1
    live.log(2)
    live.report.close()
    shown = [("evaluating" in line, "loss 0.5" in line) for line in bars(live) if "/8" in line]
    assert (True, False) in shown
    assert shown[-1] == (False, True)


@pytest.mark.parametrize("name", ["d_loss", "macro_f1", "pixel_iou"])
def test_metrics_with_an_underscore_are_shown(plain, name):
    plain.report.on_start(20, 0)
    plain.step(6)
    plain.report.on_window(step_info(6), {"loss": 0.5, name: 0.25}, 2000.0, 0.5)
    assert plain.lines == [
        f"train step      6/20  epoch   1.50  loss 0.5000  {name} 0.2500  lr 0.0312  2,000 samples/s"
    ]


def test_a_bar_goes_on_where_a_run_stood(live):
    live.report.on_start(10, 4)
    live.report.close()
    assert " 4/10" in live.file.getvalue()


def test_the_bar_is_gone_before_the_result_is_said(live):
    live.report.on_start(3, 0)
    live.log(3)
    live.report.on_end(summary())
    assert "train" not in live.file.getvalue().rpartition("done:")[2]


def test_closing_twice_is_harmless(live):
    live.report.on_start(3, 0)
    live.report.close()
    live.report.close()


def test_the_result_is_short(plain):
    plain.report.on_end(summary())
    assert plain.lines == [
        "done: loss 0.1250, accuracy 0.9750; 1,234 steps in 12.2 s, 5,000 samples/s",
        "run directory: runs/x",
        "checkpoint: none",
    ]


def test_the_result_names_the_checkpoint(plain):
    plain.report.on_end(summary(checkpoint="runs/x/checkpoints/step-00001234"))
    assert plain.lines[-1] == "checkpoint: runs/x/checkpoints/step-00001234"


@pytest.mark.parametrize(
    ("checkpoint", "lines"),
    [
        (None, []),
        (
            "c/step-00000003",
            ["checkpoint: c/step-00000003; the same command with --resume continues from it"],
        ),
    ],
)
def test_a_run_that_was_stopped_says_how_to_go_on(plain, checkpoint, lines):
    plain.report.on_end(summary(status="stopped", checkpoint=checkpoint))
    assert plain.lines == lines


@pytest.mark.parametrize(
    ("number", "checkpoint", "said"),
    [
        (1, None, "note: 1 checkpoint could not be written; the last: step 9: full; newest good one: none"),
        (3, "c", "note: 3 checkpoints could not be written; the last: step 9: full; newest good one: c"),
    ],
)
def test_failed_saves_are_counted_at_the_end(plain, number, checkpoint, said):
    plain.report.on_end(summary(failed_saves=number, save_error="step 9: full", checkpoint=checkpoint))
    assert plain.lines[0] == said


def test_a_run_without_evaluation_says_so(plain):
    plain.report.on_end(summary(final={}))
    assert plain.lines[0].startswith("done: no evaluation; ")


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_did_not_end_well_is_not_called_done(plain, tmp_path, status):
    plain.report.on_end(summary(status=status, error="the loss is nan"))
    assert plain.lines == []
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["status"], written["error"]) == (status, "the loss is nan")


def test_the_report_of_other_ranks_says_and_writes_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    silent = SilentReport()
    silent.say("x")
    silent.note("x")
    silent.on_start(3, 0)
    silent.on_step(step_info(1), METRICS)
    silent.on_window(step_info(1), MEANS, 1.0)
    silent.on_evaluation(step_info(1), MEANS, 1.0)
    silent.on_end(summary())
    silent.close()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_seconds_count_from_the_start_of_training(clock):
    silent = SilentReport()
    clock.seconds += 7
    silent.on_start(3, 0)
    clock.seconds += 2
    assert silent.seconds() == 2
