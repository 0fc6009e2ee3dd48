"""What a dry run's results say of data, model and loss."""

from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.backends.records import DryRun
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import DataError, NonFiniteLossError, TaskError
from hvdtrain.jobs.opening import dry_run_checks
from hvdtrain.jobs.opening.dry_run import reused_array
from hvdtrain.jobs.opening.dry_run_checks import Pass, find_error, find_notes, random_note, scale_note

RANDOM = np.random.RandomState(3)
LOGITS = RANDOM.randn(4, 3).astype(np.float32)
LABELS = np.asarray([0, 1, 2, 1])
INDICES = np.asarray([40, 3, 17, 5])


def softmax(logits):
    exponents = np.exp(logits)
    return (exponents / exponents.sum(-1, keepdims=True)).astype(np.float32)


def passed(
    outputs=LOGITS, targets=LABELS, *, loss="cross_entropy", values=None, error=None, last="", **arrays
) -> Pass:
    given = {"inputs": np.ones((4, 2), np.float32), "targets": targets, **arrays}
    loss_values = np.ones(4, np.float32) if values is None else values
    result = DryRun(outputs, {} if error else {"loss": loss_values}, last, error)
    return Pass("training data", given, INDICES, result, named_loss=loss)


def problem(run) -> str:
    error = find_error(run)
    return "" if error is None else str(error)


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ([0, 1, 3, 4], "reach 4, and the model has 3 outputs (classes 0 to 2): sample 17 has 3"),
        ([0, -1, 2, 1], "go down to -1, and the model has 3 outputs (classes 0 to 2): sample 3 has -1"),
        ([1, 2, 3, 1], "The classes seem to be numbered from 1"),
    ],
)
@pytest.mark.parametrize("raised", [None, IndexError("Target 3 is out of bounds.")])
def test_labels_that_have_no_output_are_refused_with_the_sample(targets, said, raised):
    found = find_error(passed(targets=np.asarray(targets), error=raised))
    assert isinstance(found, DataError)
    assert said in str(found)


def test_a_sound_batch_labels_that_fit_or_cannot_be_judged_and_what_may_be_logits_pass():
    assert find_error(passed()) is None
    assert list(find_notes(passed())) == []
    assert find_error(passed(LOGITS, np.asarray([-100, 0, 2, -100]))) is None
    assert find_error(passed(RANDOM.randn(4, 5, 5, 3).astype(np.float32), np.full((4, 5, 5), 2))) is None
    assert find_error(passed({"states": LOGITS}, np.asarray([9, 9, 9, 9]))) is None
    assert find_error(replace(passed(targets=np.asarray([255, 0, 2, 1])), ignore_index=255)) is None
    assert find_error(passed(np.vstack([softmax(LOGITS[:3]), LOGITS[:1]]))) is None
    assert find_error(passed(softmax(LOGITS), loss="")) is None
    assert find_error(passed(np.full((4, 1), 0.3), np.zeros(4, int), loss="binary_cross_entropy")) is None


@pytest.mark.parametrize("shape", [(4, 3), (4, 2, 2, 2)])
def test_probabilities_into_cross_entropy_are_refused(shape):
    outputs = softmax(RANDOM.randn(*shape))
    found = find_error(passed(outputs, np.zeros(shape[:-1], int)))
    assert isinstance(found, TaskError)
    assert "the loss cross_entropy takes logits" in found.problem
    assert "classifier_activation=None" in found.remedy


def test_a_sigmoid_before_binary_cross_entropy_is_refused_or_noted_where_the_last_layer_is_not_known():
    outputs = np.full((4, 1), 0.5, np.float32)
    run = passed(outputs, np.zeros((4, 1), int), loss="binary_cross_entropy", last="sigmoid")
    assert "the last layer is a sigmoid" in problem(run)
    run = passed(np.full((4, 9), 0.4, np.float32), np.zeros((4, 9), int), loss="binary_cross_entropy")
    assert find_error(run) is None
    ((kind, text),) = find_notes(run)
    assert (kind, "if the model ends in a sigmoid, remove it" in text) == ("probabilities", True)


def test_data_or_losses_that_are_not_finite_are_named_and_data_only_noted_if_the_loss_is_finite():
    with_nan = np.ones((4, 2), np.float32)
    with_nan[2, 0] = np.nan
    found = find_error(passed(inputs=with_nan, values=np.full(4, np.nan)))
    assert isinstance(found, DataError)
    assert found.problem.endswith("is nan: 'inputs' of sample 17 holds nan")
    run = passed(inputs=with_nan)
    assert find_error(run) is None
    assert [text for _, text in find_notes(run)] == ["in the training data, 'inputs' of sample 17 holds nan"]
    found = find_error(passed(np.full_like(LOGITS, np.nan), values=np.asarray([1, np.inf, 1, 1])))
    assert isinstance(found, NonFiniteLossError)
    assert "before any step" in found.problem
    assert "not the model's outputs" in found.problem


@pytest.mark.parametrize(
    ("last", "metrics", "named"),
    [
        ("sigmoid", {"area": "auc", "it": "f1"}, "metrics['it']"),
        ("softmax", {"f": "f1", "it": "auc"}, "metrics['it']"),
        ("softmax", {"f": "f1", "r": "accuracy"}, ""),
    ],
)
def test_a_metric_of_logits_refuses_the_probabilities_that_make_it_wrong(last, metrics, named):
    run = replace(passed(softmax(LOGITS), loss="", last=last), named_metrics=metrics)
    found = problem(run)
    assert (f"the last layer is a {last}), and {named} takes logits" in found) == bool(named)
    assert bool(found) == bool(named)
    assert not problem(replace(run, result=replace(run.result, outputs=LOGITS)))


def test_outputs_that_differ_between_two_evaluations_are_noted_and_rounding_is_not():
    once = DryRun({"logits": LOGITS}, {"loss": np.ones(4)})
    again = replace(once, outputs={"logits": LOGITS * 1.1}, values={"loss": np.full(4, 1.2)})
    note = random_note("evaluation data", once, again)
    assert "a loss of 1 and of 1.2, values that differ by 20.0%" in note
    assert random_note("evaluation data", once, replace(once, outputs={"logits": LOGITS * 1.00001})) == ""


def test_inputs_of_another_scale_are_noted():
    training = {"inputs": RANDOM.rand(8, 8).astype(np.float32), "targets": np.arange(8)}
    for scale, is_noted in ((255, True), (1 / 255, True), (4, False)):
        found = {**training, "inputs": training["inputs"] * scale}
        assert bool(scale_note("evaluation data", found, training)) == is_noted


def broadcast(loss, slope=1.0, padded=0) -> str:
    """Return what is found of a loss of (outputs (n, 1), targets (n,)); a pair is a mean and its weight."""
    weights = np.asarray([1.0] * (6 - padded) + [0.0] * padded, np.float32)[None]
    given = {"inputs": np.arange(6.0)[:, None] + 1, "targets": np.asarray([0, 0, 1, 0, 1, 1.0])}
    batch = HostBatch(0, {k: array[None] for k, array in given.items()}, weights, 6.0, np.arange(6)[None])

    def compute(batch):
        chosen = batch.weights[0] >= batch.weights[0].max()  # padding alone stays
        inputs, targets = (batch.arrays[name][0][chosen] for name in ("inputs", "targets"))
        found, weighted = loss(slope * inputs, targets), ()
        if isinstance(found, tuple):  # a mean of the batch
            found, weighted = np.full(len(targets), found[0]), ("loss",)
        return DryRun({"logits": slope * inputs, "loss": np.zeros(())}, {"loss": found}, weighted=weighted)

    error = dry_run_checks.find_broadcast("evaluation data", batch, compute(batch).outputs, compute)
    return "" if error is None else error.problem


@pytest.mark.parametrize(
    "loss",
    [
        lambda outputs, targets: (np.mean(targets == (outputs[:, 0] > 9)), 6),  # it predicts one class
        lambda outputs, _: (np.mean((outputs - 2) ** 2), 6),  # an autoencoder has no use for targets
        lambda outputs, targets: (outputs[:, 0] - targets) ** 2,
    ],
)
@pytest.mark.parametrize("padded", [0, 5])
def test_means_of_a_batch_are_not_taken_for_broadcast(loss, padded):
    assert broadcast(loss, padded=padded) == ""


@pytest.mark.parametrize(
    ("loss", "slope", "found"),
    [
        (lambda outputs, targets: ((outputs - targets) ** 2).mean(1), 1.0, "it is 0.5, 6.5; their own"),
        (lambda outputs, targets: (np.mean((outputs - targets) ** 2), 6), 1.0, "it is 3.5, 3.5; their own"),
        (lambda outputs, targets: ((outputs - targets) ** 2).mean(1), 0.0, "it is 0.5, 0.5; their own"),
    ],
)
@pytest.mark.parametrize("padded", [0, 2])
def test_a_loss_that_is_broadcast_is_found(loss, slope, found, padded):
    problem = broadcast(loss, slope, padded)
    assert "the loss compares each sample with all others" in problem
    assert "outputs are (6, 1), 'targets' is (6,)" in problem or padded
    assert found in problem


class Items:
    """Samples, perhaps in one buffer; or batches of them."""

    def __init__(self, reuses):
        self.buffer, self.reuses = np.zeros(3, np.float32), reuses

    def __len__(self):
        return 40

    def __getitem__(self, index):
        self.buffer[:] = index
        return {"inputs": self.buffer if self.reuses else self.buffer.copy(), "targets": index}


def test_data_that_return_one_buffer_are_found():
    def batch(self, indices):
        rows = self.buffer[: len(indices)]
        rows[:] = indices
        return {"inputs": rows if self.reuses else rows.copy()}

    for kind in (Items, type("Batches", (Items,), {"batch": batch})):
        assert [reused_array(kind(reuses)) for reuses in (False, True)] == ["", "inputs"]
