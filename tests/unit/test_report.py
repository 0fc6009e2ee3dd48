"""What a run shows and writes."""

import io
import json
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from hvdtrain import report as report_module
from hvdtrain.backends.base import Totals
from hvdtrain.metrics import StepMark
from hvdtrain.report import RunReport, SilentReport, write_json
from hvdtrain.summary import Summary

TOTALS = Totals({"loss": 1.0}, 4.0)
MEANS = {"loss": 0.5, "accuracy": 0.75}


def mark(step: int) -> StepMark:
    return StepMark(step, (step - 1) * 4, step * 4, step / 4, 2, 0.03125, 0.0)


def summary(**changes: object) -> Summary:
    values = {
        "status": "completed",
        "framework": "torch",
        "task": "digits",
        "workers": 2,
        "steps": 1234,
        "samples": 4936,
        "epochs": 2.5,
        "seconds": 12.25,
        "samples_per_second": 5000.0,
        "final": {"loss": 0.125, "accuracy": 0.975},
        "run_dir": "runs/x",
    }
    return Summary(**{**values, **changes})


@pytest.fixture
def clock(monkeypatch):
    """The seconds that a report reads, moved by hand."""
    now = SimpleNamespace(seconds=100.0)
    fake = SimpleNamespace(perf_counter=lambda: now.seconds, time=lambda: 1_700_000_000.0)
    monkeypatch.setattr(report_module, "time", fake)
    return now


class Watched:
    """A report on a console that a test can read."""

    def __init__(self, folder, terminal: bool) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=terminal, width=160, _environ={})
        self.report = RunReport(self.console, folder)

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def step(self, step: int) -> None:
        self.report.stepped(mark(step), TOTALS)

    def log(self, step: int) -> None:
        self.step(step)
        self.report.trained(mark(step), MEANS, 2000.0)


@pytest.fixture
def plain(tmp_path, clock):
    watched = Watched(tmp_path, terminal=False)
    yield watched
    watched.report.close()


@pytest.fixture
def live(tmp_path, clock):
    watched = Watched(tmp_path, terminal=True)
    yield watched
    watched.report.close()


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_logged_window_has_the_fields_of_the_contract(plain, tmp_path, clock):
    plain.report.start(10, 0)
    clock.seconds += 1.5
    plain.log(6)
    assert records(tmp_path) == [
        {
            "phase": "train",
            "step": 6,
            "samples": 24,
            "epoch": 1.5,
            "loss": 0.5,
            "accuracy": 0.75,
            "learning_rate": 0.03125,
            "samples_per_second": 2000.0,
            "workers": 2,
            "seconds": 1.5,
        }
    ]


def test_an_evaluation_has_the_fields_of_the_contract(plain, tmp_path):
    plain.report.start(10, 0)
    plain.step(6)
    plain.report.evaluated(mark(6), MEANS, 3000.0)
    assert records(tmp_path) == [
        {
            "phase": "eval",
            "step": 6,
            "samples": 24,
            "epoch": 1.5,
            "loss": 0.5,
            "accuracy": 0.75,
            "learning_rate": 0.03125,
            "samples_per_second": 3000.0,
            "workers": 2,
            "seconds": 0.0,
        }
    ]


def test_lines_are_on_disk_while_the_run_goes_on(plain, tmp_path):
    plain.report.start(10, 0)
    plain.log(1)
    plain.log(2)
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


def test_a_second_part_of_a_run_is_added_to_its_metrics(tmp_path, clock):
    for step in (1, 2):
        watched = Watched(tmp_path, terminal=False)
        watched.report.start(2, 0)
        watched.log(step)
        watched.report.close()
    assert [record["step"] for record in records(tmp_path)] == [1, 2]


@pytest.fixture
def events(monkeypatch):
    """Reads a folder's scalars with TensorBoard's own reader, without TensorFlow."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def read(folder) -> dict[str, list[tuple[int, float]]]:
        accumulator = EventAccumulator(str(folder)).Reload()
        return {
            tag: [(e.step, e.value) for e in accumulator.Scalars(tag)]
            for tag in accumulator.Tags()["scalars"]
        }

    return read


def test_a_metric_that_is_no_number_is_null_for_every_reader(plain, tmp_path):
    plain.report.start(10, 0)
    plain.report.evaluated(mark(6), {"loss": 0.5, "recall": float("nan")}, 3000.0)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert records(tmp_path)[0]["recall"] is None


def test_tensorboard_reads_the_events(plain, tmp_path, events):
    plain.report.start(10, 0)
    plain.log(3)
    plain.report.evaluated(mark(3), MEANS, 3000.0)
    plain.log(4)
    assert events(tmp_path) == {
        "train/loss": [(3, 0.5), (4, 0.5)],
        "train/accuracy": [(3, 0.75), (4, 0.75)],
        "train/learning_rate": [(3, 0.03125), (4, 0.03125)],
        "train/samples_per_second": [(3, 2000.0), (4, 2000.0)],
        "eval/loss": [(3, 0.5)],
        "eval/accuracy": [(3, 0.75)],
        "eval/learning_rate": [(3, 0.03125)],
        "eval/samples_per_second": [(3, 3000.0)],
    }


def test_lines_begin_with_the_first_window_and_then_come_every_few_seconds(plain, clock):
    plain.report.start(100, 0)
    shown = []
    for step, seconds in [(10, 0.0), (20, 1.0), (30, 4.9), (40, 5.0), (50, 9.9), (60, 10.5)]:
        clock.seconds = 100.0 + seconds
        before = len(plain.lines)
        plain.log(step)
        shown += [step] * (len(plain.lines) - before)
    assert shown == [10, 40, 60]


def test_the_last_window_is_always_a_line(plain):
    plain.report.start(20, 0)
    plain.log(10)
    plain.log(20)
    assert [line.split()[2] for line in plain.lines] == ["10/20", "20/20"]


def test_a_line_says_what_matters(plain):
    plain.report.start(20, 0)
    plain.log(6)
    assert plain.lines == [
        "train step      6/20  epoch   1.50  loss 0.5000  accuracy 0.7500  lr 0.0312  2,000 samples/s"
    ]


def test_plain_text_holds_no_control_characters(plain):
    plain.report.say("the plan [with brackets]: 1,797 samples")
    plain.report.note("careful")
    plain.report.start(1, 0)
    plain.log(1)
    plain.report.finish(summary())
    text = plain.file.getvalue()
    assert text.isascii()
    assert "\x1b" not in text
    assert "the plan [with brackets]: 1,797 samples\nnote: careful\n" in text


def test_an_evaluation_is_a_line_of_its_own(plain):
    plain.report.start(20, 0)
    plain.step(6)
    plain.report.evaluated(mark(6), MEANS, 3000.0)
    assert plain.lines == ["eval  step      6  epoch   1.50  loss 0.5000  accuracy 0.7500"]


def test_the_bar_shows_steps_values_and_time_left(live, clock):
    live.report.start(3, 0)
    clock.seconds += 1
    live.log(2)
    live.report.close()
    text = live.file.getvalue()
    assert "2/3" in text
    assert "loss 0.5000  accuracy 0.7500  lr 0.0312  2,000 samples/s" in text
    assert "left" in text


def test_the_bar_ends_at_the_last_step_however_fast_it_came(live):
    live.report.start(3, 0)
    for step in (1, 2, 3):
        live.log(step)
    live.report.finish(summary())
    bars = [line for line in live.file.getvalue().replace("\r", "\n").splitlines() if "/3" in line]
    assert "3/3" in bars[-1]
    assert "loss 0.5000" in bars[-1]


def test_a_bar_goes_on_where_a_run_stood(live):
    live.report.start(10, 4)
    live.report.close()
    assert " 4/10" in live.file.getvalue()


def test_the_bar_is_gone_before_the_result_is_said(live):
    live.report.start(3, 0)
    live.log(3)
    live.report.finish(summary())
    assert "train" not in live.file.getvalue().rpartition("done:")[2]


def test_closing_twice_is_harmless(live):
    live.report.start(3, 0)
    live.report.close()
    live.report.close()


def test_the_result_is_short(plain, tmp_path):
    plain.report.finish(summary())
    assert plain.lines == [
        "done: loss 0.1250, accuracy 0.9750; 1,234 steps in 12.2 s, 5,000 samples/s",
        f"run directory: {tmp_path}",
    ]


def test_a_run_without_evaluation_says_so(plain):
    plain.report.finish(summary(final={}))
    assert plain.lines[0].startswith("done: no evaluation; ")


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_did_not_end_well_is_not_called_done(plain, tmp_path, status):
    plain.report.finish(summary(status=status, error="the loss is nan"))
    assert plain.lines == []
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["status"], written["error"]) == (status, "the loss is nan")


def test_the_summary_has_the_fields_of_the_contract(plain, tmp_path):
    plain.report.finish(summary())
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "status": "completed",
        "framework": "torch",
        "task": "digits",
        "workers": 2,
        "steps": 1234,
        "samples": 4936,
        "epochs": 2.5,
        "seconds": 12.25,
        "samples_per_second": 5000.0,
        "final": {"loss": 0.125, "accuracy": 0.975},
        "run_dir": "runs/x",
    }


def test_a_json_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "summary.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}


def test_the_report_of_other_ranks_says_and_writes_nothing(tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    silent = SilentReport()
    silent.say("x")
    silent.note("x")
    silent.start(3, 0)
    silent.stepped(mark(1), TOTALS)
    silent.trained(mark(1), MEANS, 1.0)
    silent.evaluated(mark(1), MEANS, 1.0)
    silent.finish(summary())
    silent.close()
    assert capfd.readouterr() == ("", "")
    assert list(tmp_path.iterdir()) == []


def test_seconds_count_from_the_start_of_training(clock):
    silent = SilentReport()
    clock.seconds += 7
    silent.start(3, 0)
    clock.seconds += 2
    assert silent.seconds() == 2
