"""The shared loop over a backend without tensors: when what happens, and with which numbers."""

import numpy as np
import pytest
from support.fakes import FakeBackend, make_loop_session, on_every_rank, one_worker, trained

from hvdtrain.data.order import ShuffledOrder
from hvdtrain.errors import NonFiniteLossError
from hvdtrain.loop import run


def test_a_step_is_read_when_the_next_has_been_launched_and_a_window_is_the_mean_over_samples(tmp_path):
    backend, report, _ = trained(tmp_path, epochs=1, log_every=100)
    steps = [call for call in backend.calls if "train" in call]
    assert steps == ["train 1", "train 2", "read train 1", "train 3", "read train 2", "read train 3"]
    assert report.windows == [(3, {"loss": (1 * 4 + 2 * 4 + 3 * 2) / 10})]


@pytest.mark.parametrize(("log_every", "logged"), [(2, [2, 4, 5]), ("1epoch", [3, 5]), (100, [5])])
def test_windows_are_logged_when_due_and_at_the_end(tmp_path, log_every, logged):
    _, report, _ = trained(tmp_path, log_every=log_every)
    assert [step for step, _ in report.windows] == logged


@pytest.mark.parametrize(
    ("eval_every", "evaluated"), [("1epoch", [3, 5]), (2, [2, 4, 5]), (None, [5]), (5, [5])]
)
def test_evaluation_comes_when_due_and_once_at_the_end(tmp_path, eval_every, evaluated):
    _, report, _ = trained(tmp_path, eval_size=7, eval_every=eval_every)
    assert [step for step, _ in report.evaluations] == evaluated


def test_the_rate_of_a_step_is_the_schedules_at_its_middle(tmp_path):
    backend, _, _ = trained(tmp_path, learning_rate=1.0, warmup_epochs=2)
    assert backend.rates == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_loss_that_is_no_number_stops_training_and_names_step_and_rate(tmp_path, value, step):
    backend = FakeBackend(one_worker(), losses={step: value})
    with pytest.raises(NonFiniteLossError) as caught:
        trained(tmp_path, backend, learning_rate=0.25)
    assert caught.value.problem == f"the loss is {value} at step {step}, with learning rate 0.25"
    assert caught.value.everywhere
    assert f"train {step + 2}" not in backend.calls


def test_data_that_are_not_finite_are_named_in_place_of_the_learning_rate(tmp_path):
    """Samples of a step are spread over the workers; all of them name the one that is not finite."""

    def work(workers):
        session = make_loop_session(tmp_path, FakeBackend(workers, losses={2: float("nan")}), train_size=32)
        order = ShuffledOrder(32, session.config.seed).indices(np.arange(32))
        bad = int(order[8 + 5])  # of the second step, on rank 1
        session.data.training.arrays["inputs"][bad] = np.inf
        with pytest.raises(NonFiniteLossError) as caught:
            run(session)
        return str(caught.value).replace(f"sample {bad} ", "sample BAD ")

    outcomes = on_every_rank(["alpha", "beta"], work)
    assert outcomes == 2 * [
        "the loss is nan at step 2, with learning rate 0.02: in the training data, 'inputs' of sample BAD "
        "holds inf\nRemove such samples, or replace the values."
    ]


def test_missing_gradients_are_told_once_with_names_and_ranks(tmp_path):
    def work(workers):
        backend = FakeBackend(workers, unused_at=(2, 3))
        return trained(tmp_path, backend, check_replicas_every=1000)[1].notes

    outcomes = on_every_rank(["alpha", "beta"], work)
    said = "no gradient reached model/branch/kernel on rank 1 at step 2; "
    said += "where another worker has one, this counts as zero"
    assert outcomes == [[said], [said]]


@pytest.mark.parametrize(("every", "times"), [(1000, 2), (2, 3), (1, 5)])
def test_replicas_are_compared_at_the_start_in_between_and_at_the_end(tmp_path, every, times):
    """Of two workers with steps of 8 samples: 20 samples are 3 steps."""

    def work(workers):
        return trained(tmp_path, FakeBackend(workers), check_replicas_every=every)[0].calls.count("compare")

    assert on_every_rank(["here"] * 2, work) == [times] * 2
