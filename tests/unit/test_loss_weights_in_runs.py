"""Windows of a run, whose loss may have weights of its own: means, checkpoints, and refused weights."""

import json
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.fakes import FakeBackend, asks, make_loop_session, one_worker, trained

from hvdtrain.backends.step_metrics import ControlFlags, StepMetrics, StepStatistics
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.data.datasets import as_dataset, fetch
from hvdtrain.errors import DataError, TaskError
from hvdtrain.loop import run
from hvdtrain.metrics import Window
from hvdtrain.reporting.jsonl import to_json
from hvdtrain.session import RunState


class Weighing(FakeBackend):
    """The loss of step k is k, over weights[k - 1]."""

    def __init__(self, weights) -> None:
        super().__init__(one_worker())
        self._weights = weights

    def train_step(self, batch, *args):
        metrics = super().train_step(batch, *args).read()
        weight = self._weights[batch.step]
        sums = {"loss": (batch.step + 1) * weight if weight else 0.0}
        metrics = replace(metrics, sums=sums, weights={"loss": weight})
        return SimpleNamespace(read=lambda: metrics)


def test_a_window_has_the_mean_over_what_counts_in_its_steps(tmp_path):
    _, report, _ = trained(tmp_path, Weighing([3.0, 0.0, 1.0, 0.0, 5.0]), log_every=3)
    assert report.windows == [(3, {"loss": 1.5}), (5, {"loss": 5.0})]


def test_a_window_in_which_nothing_counts_has_no_loss_and_training_goes_on(tmp_path):
    _, report, _ = trained(tmp_path, Weighing([1.0, 0.0, 1.0, 1.0, 1.0]))
    losses = [means["loss"] for _, means in report.windows]
    assert math.isnan(losses.pop(1))
    assert losses == [1.0, 3.0, 4.0, 5.0]
    assert json.loads(to_json(report.windows[1][1])) == {"loss": None}


def test_a_checkpoint_keeps_the_weights_of_its_window(tmp_path):
    weights = [3.0, 0.5, 1.0, 7.0, 5.0]
    _, whole, _ = trained(tmp_path, Weighing(weights), log_every=3)
    first = make_loop_session(tmp_path, Weighing(weights), save_every=1, log_every=3)
    run(first, asks({4: ControlFlags(stop=True)}, first.backend))
    manifest = Manifest.model_validate(json.loads(first.services.saver.manifests[-1].model_dump_json()))
    second = make_loop_session(tmp_path, Weighing(weights), log_every=3)
    second.state = RunState.from_manifest(manifest, second.config)
    run(second)
    assert first.services.report.windows + second.services.report.windows == whole.windows


def test_weights_that_are_none_are_refused(tmp_path):
    for weights, said in (([1.0, 1.0, math.nan], "nan in step 3"), ([0.0] * 5, "all its weights are 0")):
        with pytest.raises(TaskError, match=said):
            trained(tmp_path, Weighing(weights))


@pytest.mark.parametrize(("weights", "fields", "notes"), [
    ([0.004] * 5, {"compression": "fp16"}, 1), ([0.004] * 5, {}, 0), ([4.0] * 5, {"compression": "fp16"}, 0),
])  # fmt: skip
def test_small_weights_are_said_once_if_gradients_are_rounded_to_16_bits(tmp_path, weights, fields, notes):
    _, report, _ = trained(tmp_path, Weighing(weights), **fields)
    assert len(report.notes) == notes
    assert all("the weights of the loss are 0.001 on average" in note for note in report.notes)


@pytest.mark.parametrize("value", [-0.5, math.nan, math.inf])
def test_weights_of_samples_are_refused_by_the_samples_index(value):
    weights = np.ones((6, 3), np.float32)
    weights[4] = value
    data = as_dataset({"inputs": np.zeros((6, 2)), "weights": weights})
    assert fetch(data, np.array([1, 3]))["weights"].tolist() == np.ones((2, 3)).tolist()
    with pytest.raises(DataError, match="must be finite and not negative; sample 4 has"):
        fetch(data, np.array([2, 4, 0]))


def test_the_share_of_waiting_is_the_mean_over_workers():
    window, statistics = Window(started_seconds=10.0), StepStatistics(data_wait_seconds=1.0)
    for seconds in (11.0, 14.0):
        window.add(StepMetrics({"loss": 1.0}, weight=1.0, statistics=statistics), seconds)
    assert window.data_wait_fraction(workers=2) == 0.25


def test_a_metric_that_some_steps_leave_out_has_the_mean_of_the_others():
    window = Window(started_seconds=0.0)
    for step in range(7):
        sums = {"loss": 4.0, **({"own": 8.0} if step in {2, 5} else {})}
        window.add(StepMetrics(sums, weight=4.0), 1.0)
    assert window.means() == {"loss": 1.0, "own": 2.0}
