"""The names of hvdtrain for scripts and notebooks: what they show, return and refuse."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from support.fakes import on_every_rank
from support.numpy_backend import NumpyDigits

from hvdtrain.callbacks import Best, Summary
from hvdtrain.checkpoints import storage
from hvdtrain.config import Config, Layer
from hvdtrain.errors import CheckpointError, TaskError, UsageError
from hvdtrain.host.launcher import muted_console, open_console
from hvdtrain.jobs import failures
from hvdtrain.jobs.failures import is_shared
from hvdtrain.jobs.outcome import best_of
from hvdtrain.jobs.serving.checkpoint import chosen_checkpoint
from hvdtrain.jobs.train import run_job
from hvdtrain.reporting.records import line_of


def quiet(best=False, **fields) -> Summary:
    """Train as ``hvdtrain.train(quiet=True)`` does."""
    given = {"framework": "numpy", "task": "digits", "learning_rate": 0.1, "run_dir": "run", **fields}
    with muted_console():
        return run_job([Layer("train()", given)], NumpyDigits, from_python=True, best=best)


@pytest.mark.usefixtures("train")
def test_a_quiet_training_shows_nothing_and_its_summary_has_the_history_over_resumes(capfd):
    quiet(steps=4, log_every=2, eval_every=2, save_every=2)
    assert "".join(capfd.readouterr()) == ""
    assert Path("run/config.yaml").is_file()
    open_console().print("shown again")
    assert "shown again" in capfd.readouterr().out
    summary = quiet(steps=8, log_every=2, eval_every=2, resume="auto")
    expected = [(phase, step) for step in (2, 4, 6, 8) for phase in ("train", "eval")]
    assert [(r["phase"], r["step"]) for r in summary.history] == expected
    written = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    assert summary.history == written
    losses = {r["step"]: r["loss"] for r in summary.history if r["phase"] == "eval"}
    step = min(losses, key=losses.get)
    assert (summary.best["loss"].value, summary.best["loss"].step) == (losses[step], step)
    assert set(summary.best) == {"loss", "accuracy"}
    assert "history" not in json.loads(Path("run/summary.json").read_text())


def line(phase: str, step: int, **values: object) -> dict:
    return {"phase": phase, "step": step, "samples": 1, "epoch": 0.1, **values, "workers": 1, "seconds": 1.0}


def test_best_values_by_the_end_that_is_better():
    config = Config(framework="torch", early_stopping="score:min")
    history = [
        line("train", 1, loss=0.0),
        line("eval", 1, loss=2.0, accuracy=0.5, score=3.0, learning_rate=9.0),
        line("eval", 2, loss=math.nan, accuracy=0.7, score=1.0, learning_rate=9.0),
        line("eval", 3, loss=1.0, accuracy=0.7, score=2.0, learning_rate=9.0),
    ]
    assert best_of([line_of(record) for record in history], config, {3: "c/step-00000003"}) == {
        "loss": Best(1.0, 3, "c/step-00000003"),
        "accuracy": Best(0.7, 2),
        "score": Best(1.0, 2),
    }


def test_the_best_checkpoint_of_a_run(train):
    train(steps=6, eval_every=2, save_every=2, keep_last=None)
    saved = storage.checkpoints_in(Path("run/checkpoints"))
    losses = {path: json.loads((path / "trainer.json").read_text())["metrics"]["loss"] for path in saved}
    lowest = min(losses, key=losses.get)
    assert chosen_checkpoint(Path("run"), True) == chosen_checkpoint(Path("run"), "loss") == lowest
    assert chosen_checkpoint(Path("run"), "loss:max") != lowest
    assert chosen_checkpoint(Path("run"), False) == Path("run")
    with pytest.raises(CheckpointError, match="Metrics that they have: accuracy, loss"):
        chosen_checkpoint(Path("run"), "f1")
    with pytest.raises(UsageError, match="best must be True"):
        chosen_checkpoint(Path("run"), 3)
    highest = chosen_checkpoint(Path("run"), "loss:max")
    assert saved[-1] != highest
    for number, (best, init) in enumerate({"loss:max": Path("run"), False: highest}.items()):
        quiet(steps=6, run_dir=f"tuned{number}", init=str(init), best=best)
    first, second = (Path(f"tuned{number}/metrics.jsonl").read_text().splitlines() for number in (0, 1))
    assert [json.loads(line)["loss"] for line in first] == [json.loads(line)["loss"] for line in second]
    with pytest.raises(UsageError, match="a checkpoint of the run that init names"):
        quiet(steps=1, run_dir="none", best=True)


def test_an_error_of_one_worker_is_not_shared(monkeypatch):
    monkeypatch.setattr(failures, "_SHARED_SECONDS", 0.2)

    def ask(workers: Any) -> bool:
        if workers.rank == 0:  # which did not fail
            return False
        shared = is_shared(TaskError("no data"), workers)
        workers._barrier.abort()  # as Horovod's end does
        return shared

    assert on_every_rank(["here"] * 2, ask) == [False, False]
