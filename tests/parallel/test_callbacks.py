"""Callbacks in real jobs: the example, those of rank 0 alone, and one that fails on one of several ranks."""

import json
import textwrap

import pytest
from PIL import Image
from support.documents import ROOT
from support.jobs import launcher, run
from support.pool import controller_of, train

COLUMNS, WIDTH, TITLE_HEIGHT, ROW_HEIGHT = 8, 80, 18, 86  # pixels of the example's pictures

GATHERING = """
    from hvdtrain import Callback
    from hvdtrain.tasks.digits import Digits


    class Gathering(Callback):
        every_rank = True

        def on_start(self, context):
            self.rank = context.rank

        def on_evaluation(self, step, metrics):
            import horovod.torch as hvd
            import torch

            ranks = hvd.allgather(torch.tensor([self.rank])).tolist()
            assert ranks == [0, 1]
            if step.step == 4 and self.rank == 1:
                raise ValueError("the disk of rank 1 is full")


    class Task(Digits):
        callbacks = [Gathering()]
"""


ON_RANK_0 = """
    from hvdtrain.tasks.digits import Digits


    class Log:
        def on_step(self, step, values):
            print("step", step.step, flush=True)

        def on_window(self, step, values):
            print("window", step.step, flush=True)


    class Task(Digits):
        def callbacks(self):
            import horovod.torch as hvd

            return [Log()] if hvd.rank() == 0 else []
"""


def test_other_workers_may_lack_the_callbacks_of_rank_0(tmp_path):
    (tmp_path / "task.py").write_text(textwrap.dedent(ON_RANK_0))
    task = f"{tmp_path}/task.py:Task"
    options = ("--framework", "torch", "--task", task, "--steps", "4", "--log-every", "2")
    done = train(2, "mpi", *options, cwd=tmp_path, timeout=60)
    seen = [line.split() for line in done.result.stdout.splitlines() if line.startswith(("step ", "window "))]
    assert [int(step) for event, step in seen if event == "step"] == [1, 2, 3, 4]
    assert [int(step) for event, step in seen if event == "window"] == [2, 4]


@pytest.mark.parametrize("framework", ["tf"])
def test_a_picture_of_the_wrong_predictions_follows_each_evaluation(framework, tmp_path):
    task = f"{ROOT}/examples/wrong_predictions.py:WatchedDigits"
    done = train(
        2, controller_of(framework, 2), "--framework", framework, "--task", task, "--steps", "40",
        "--eval-every", "20", "--set", "ema_decay=0.9", cwd=tmp_path,
    )  # fmt: skip
    evaluations = [line for line in done.metrics if line["phase"] == "eval"]
    logged = {line["step"]: line["wrong_predictions"] for line in done.metrics if line["phase"] == "callback"}
    # the callback's own count is the evaluation's: same weights, same data, evaluation mode
    assert logged == {line["step"]: round(359 * (1 - line["accuracy"])) for line in evaluations}
    assert list(logged) == [20, 40]
    for step, count in logged.items():
        with Image.open(done.folder / "images" / f"step-{step:08d}-wrong.png") as picture:
            assert picture.size == (COLUMNS * WIDTH, TITLE_HEIGHT + -(-count // COLUMNS) * ROW_HEIGHT)
            assert picture.getextrema() == (0, 255)


def test_a_callback_that_fails_on_one_rank_ends_the_job_with_its_name(tmp_path):
    (tmp_path / "task.py").write_text(textwrap.dedent(GATHERING))
    words = ["python", "-m", "hvdtrain", "--framework", "torch", "--task", "task.py:Task", "--run-dir", "run"]
    result = run(
        [*launcher(2, "gloo"), *words, "--steps", "8", "--eval-every", "2", "--save-every", "2"], tmp_path
    )
    assert result.returncode == 4, result.output[-5000:]
    said = "callback Gathering failed in on_evaluation: "
    assert result.output.count(said) == 1
    assert "ValueError: the disk of rank 1 is full" in result.output
    steps = [json.loads(line)["step"] for line in (tmp_path / "run" / "metrics.jsonl").open()]
    assert max(steps) == 4
