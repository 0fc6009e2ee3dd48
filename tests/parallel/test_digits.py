"""The default job, two workers: what it reaches, and what it leaves in the run directory."""

import contextlib

import pytest
from support import pool
from support.jobs import FRAMEWORKS, Run


@pytest.fixture(params=FRAMEWORKS)
def run(request) -> Run:
    return pool.shared_run(2, pool.controller_of(request.param, 2), "--framework", request.param)


def test_summary_says_how_the_run_ended(run):
    summary = run.summary
    assert summary["final"]["accuracy"] >= 0.97
    assert (summary["status"], summary["workers"], summary["task"]) == ("completed", 2, "digits")
    assert (summary["samples"], summary["epochs"]) == (15 * 1438, 15)
    assert summary["steps"] == -(-15 * 1438 // 64)
    assert summary["final"] == {name: run.metrics[-1][name] for name in ("loss", "accuracy")}
    assert summary["seconds"] > 0
    assert summary["samples_per_second"] > 0
    assert "error" not in summary


def test_metrics_hold_a_line_per_window_and_an_evaluation_per_epoch(run):
    lines = [line for line in run.metrics if line["phase"] == "train"]
    assert [line["step"] for line in lines] == [*range(10, 338, 10), 338]
    for line in lines:
        assert line.keys() >= {"samples", "epoch", "loss", "accuracy", "learning_rate", "samples_per_second"}
        assert line["workers"] == 2
        assert line["samples"] == min(64 * line["step"], 15 * 1438)
        assert line["epoch"] == pytest.approx(line["samples"] / 1438, abs=1e-6)
    seconds = [line["seconds"] for line in run.metrics]
    assert seconds == sorted(seconds)
    evaluated = [line["step"] for line in run.metrics if line["phase"] == "eval"]
    # the first step at or past each boundary
    assert evaluated == [-(-1438 * epoch // 64) for epoch in range(1, 16)]


def test_tensorboard_events_hold_the_metrics(run):
    events = read_events(run)
    for phase in ("train", "eval"):
        expected = [(line["step"], line["loss"]) for line in run.metrics if line["phase"] == phase]
        found = events[f"{phase}/loss"]
        assert [step for step, _ in found] == [step for step, _ in expected]
        assert [value for _, value in found] == pytest.approx([value for _, value in expected])
    assert "train/learning_rate" in events
    assert "train/samples_per_second" in events


def read_events(run: Run) -> dict[str, list[tuple[int, float]]]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.tensorflow_stub.errors import OutOfRangeError
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import PyRecordReader_New

    (path,) = run.folder.glob("events.out.tfevents.*")
    reader, found = PyRecordReader_New(str(path)), {}
    with contextlib.suppress(OutOfRangeError):
        while True:
            reader.GetNext()
            event = Event.FromString(reader.record())
            for value in event.summary.value:
                found.setdefault(value.tag, []).append((event.step, value.simple_value))
    return found


def test_config_file_repeats_the_run(run, tmp_path):
    framework = run.summary["framework"]
    again = pool.train(
        2, pool.controller_of(framework, 2), str(run.folder / "config.yaml"), "--steps", "20",
        framework=framework, cwd=tmp_path,
    )  # fmt: skip
    assert again.losses == run.losses[:2]


def test_only_rank_0_speaks_the_plan_first_and_the_result_last(run):
    assert not run.result.spoke
    lines = run.result.stdout.strip().splitlines()
    assert lines[0].startswith("hvdtrain ")
    assert "2 on 1 host" in lines[1]
    assert lines[-3].startswith("done: loss ")
    assert lines[-2] == f"run directory: {run.folder}"
    assert lines[-1] == f"checkpoint: {run.folder}/checkpoints/step-00000338"
    assert run.result.stderr == ""
