"""What a run writes: metrics.jsonl, TensorBoard events, summary.json."""

import errno
import io
import json
import os
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from rich.console import Console
from support.watching import MEANS, records, run_context, step_info, summary

from hvdtrain.config import Config
from hvdtrain.reporting import event_file
from hvdtrain.reporting import jsonl as logs
from hvdtrain.reporting.run_report import RunReport


def test_a_logged_window_has_the_fields_of_the_contract(plain, tmp_path, clock):
    plain.report.on_start(10, 0)
    clock.seconds += 1.5
    plain.log(6)
    plain.report.on_evaluation(step_info(6), {"loss": 0.5, "recall": float("nan")}, 3000.0)
    window, evaluation = records(tmp_path)
    assert window == {
        "phase": "train", "step": 6, "samples": 24, "epoch": 1.5, "loss": 0.5, "accuracy": 0.75,
        "learning_rate": 0.03125, "samples_per_second": 2000.0, "workers": 2, "seconds": 1.5,
    }  # fmt: skip
    assert (evaluation["phase"], evaluation["recall"]) == ("eval", None)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text(), "of which not every reader knows"


@pytest.fixture
def events(monkeypatch):
    """Reads a folder with TensorBoard's own reader, without TensorFlow."""
    monkeypatch.setitem(sys.modules, "tensorboard.compat.notf", ModuleType("tensorboard.compat.notf"))
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return lambda folder: EventAccumulator(str(folder)).Reload()


@pytest.mark.parametrize(("resumed_step", "kept"), [(2, [1, 2]), (0, []), (None, [1, 2, 3, 4])])
def test_tensorboard_drops_the_events_that_a_resumed_run_does_again(
    tmp_path, events, monkeypatch, resumed_step, kept
):
    for part, done in enumerate([None, resumed_step]):
        fake = SimpleNamespace(time=lambda part=part: 1_700_000_000.0 + part)
        monkeypatch.setattr(event_file, "time", fake)
        report = RunReport(Console(file=io.StringIO()), run_context(tmp_path), done)
        for step in (1, 2, 3, 4) if part == 0 else (5,):
            report.on_window(step_info(step), MEANS, 1.0)
        report.close()
    assert [event.step for event in events(tmp_path).Scalars("train/loss")] == [*kept, 5]


def test_what_cannot_be_written_is_said_once_and_written_later(plain, tmp_path, monkeypatch):
    full = True
    write = os.write

    def write_or_fail(descriptor, data):
        if full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data)

    monkeypatch.setattr(logs.os, "write", write_or_fail)
    plain.report.on_start(10, 0)
    plain.log(1)
    plain.log(2)
    full = False
    plain.log(3)
    notes = [line for line in plain.lines if line.startswith("note: ")]
    assert len(notes) == 2
    assert f"cannot write {tmp_path / 'metrics.jsonl'}: No space left on device" in notes[0]
    assert [record["step"] for record in records(tmp_path)] == [1, 2, 3]


def test_the_summary_has_the_fields_of_the_contract_and_the_console_has_plain_text(plain, tmp_path):
    plain.report.say("the plan [with brackets]: 1,797 samples")
    plain.report.note("careful")
    plain.report.on_end(summary())
    assert json.loads((tmp_path / "summary.json").read_text()) == {
        "status": "completed", "framework": "torch", "task": "digits", "workers": 2, "steps": 1234,
        "samples": 4936, "epochs": 2.5, "seconds": 12.25, "samples_per_second": 5000.0,
        "final": {"loss": 0.125, "accuracy": 0.975}, "run_dir": "runs/x", "checkpoint": None,
    }  # fmt: skip
    assert plain.lines[:2] == ["the plan [with brackets]: 1,797 samples", "note: careful"]
    assert plain.lines[2] == "done: loss 0.1250, accuracy 0.9750; 1,234 steps in 12.2 s, 5,000 samples/s"
    assert plain.lines[3:] == ["run directory: runs/x", "checkpoint: none"]
    assert plain.file.getvalue().isascii()
    assert "\x1b" not in plain.file.getvalue()


@pytest.fixture
def opened(tmp_path):
    """A report of an opened run, and the logger that its callback is given."""
    kept = []
    callback = SimpleNamespace(on_start=kept.append)
    config = Config(framework="torch", steps=8, track="tensorboard", task_options={"hidden": [32, 64]})
    context = run_context(tmp_path, config=config)
    report = RunReport(Console(file=io.StringIO()), context, callbacks=[callback])
    report.on_start(10, 0)
    return report, kept[0].log


def test_tensorboard_has_numbers_the_config_and_what_callbacks_log(tmp_path, opened, events):
    report, log = opened
    gray, colors = np.linspace(0, 1, 12).reshape(3, 4), np.full((5, 6, 3), 7, np.uint8)
    log(step_info(6), {"said": "a *text*", "gray": gray, "colors": colors, "count": np.int64(3)})
    report.on_evaluation(step_info(6), MEANS, 3000.0)
    report.close()
    line, _ = records(tmp_path)
    files = {name: line[name]["image"] for name in ("gray", "colors")}
    assert (line["said"], line["count"]) == ("a *text*", 3)
    assert files["gray"] == "images/step-00000006-gray.png"
    assert np.array_equal(np.asarray(Image.open(tmp_path / files["gray"])), np.rint(gray * 255))
    assert np.array_equal(np.asarray(Image.open(tmp_path / files["colors"])), colors)
    shown = events(tmp_path)
    found = {name: [(e.step, e.value) for e in shown.Scalars(f"eval/{name}")] for name in MEANS}
    assert found == {"loss": [(6, 0.5)], "accuracy": [(6, 0.75)]}
    (image,), (text,) = shown.Images("callback/colors"), shown.Tensors("callback/said/text_summary")
    assert (image.step, image.width, image.height) == (6, 6, 5)
    assert image.encoded_image_string == (tmp_path / files["colors"]).read_bytes()
    assert text.tensor_proto.string_val[0] == b"a *text*"
    assert shown.Tensors("config/text_summary")[0].tensor_proto.string_val[0].startswith(b"```yaml")


def test_an_image_that_cannot_be_one_is_refused(tmp_path, opened):
    report, log = opened
    images = {"large": np.full((2, 2), 1.5), "first": np.zeros((3, 8, 8)), "whole": np.zeros((2, 2), int)}
    for name, image in (images | {"../outside": np.zeros((2, 2))}).items():
        with pytest.raises(ValueError, match=r"log\(\): (the name of an image|image )"):
            log(step_info(6), {name: image})
    report.close()
    assert records(tmp_path) == []


@pytest.mark.parametrize("status", ["failed", "stopped"])
def test_a_run_that_did_not_end_well_is_not_called_done(plain, tmp_path, status):
    plain.report.on_end(summary(status=status, error="the loss is nan"))
    assert plain.lines == []
    written = json.loads((tmp_path / "summary.json").read_text())
    assert (written["status"], written["error"]) == (status, "the loss is nan")


def test_the_cell_of_a_notebook_has_a_bar_that_shows_the_last_step(monkeypatch):
    from hvdtrain.reporting import console as shown

    cells = []
    handle = SimpleNamespace(update=lambda data, raw: cells.append(data))
    display = SimpleNamespace(display=lambda data, raw, display_id: handle)
    monkeypatch.setattr(shown, "import_module", lambda name: display)
    progress = shown.Console(Console(force_jupyter=True))
    progress.on_start(SimpleNamespace(eval_sets={}, steps=4, steps_done=1))
    progress.on_step(SimpleNamespace(step=4, epoch=1.0), None)
    progress.close()
    assert cells[0]["text/plain"].strip() == "train 1/4"
    assert '<progress value="4" max="4">' in cells[-1]["text/html"]
