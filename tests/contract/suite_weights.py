"""Values that count with weights, against the full batch in numpy. Run by ``test_contract.py`` in jobs."""

import numpy as np
import pytest
from support import suite
from support.suite import started_backend, state_of  # noqa: F401

from hvdtrain import Weighted
from hvdtrain.errors import TaskError

SAMPLES, LENGTH, INPUTS, CLASSES = 24, 4, 5, 7
RANDOM = np.random.RandomState(3)
X = RANDOM.randn(SAMPLES, LENGTH, INPUTS).astype(np.float32)
LABELS = RANDOM.randint(0, CLASSES, (SAMPLES, LENGTH))
# the whole of a batch of three has no target; of the others, most have some
COUNTS = (RANDOM.rand(SAMPLES, LENGTH) < 0.4) & (np.arange(SAMPLES) > 2)[:, None]
OF_SAMPLES = RANDOM.rand(SAMPLES).astype(np.float32) * 3
OF_TARGETS = RANDOM.rand(SAMPLES, LENGTH).astype(np.float32) * (RANDOM.rand(SAMPLES, LENGTH) < 0.8)
OF_CLASSES = np.array([0.0, 1.0, 5.0, 0.25, 1.0, 2.0, 1.0])


class Tokens:
    """A linear model of every position; its cross-entropy has a gradient in closed form."""

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy", "top5": "top5_accuracy", "nll": "cross_entropy"}  # noqa: RUF012
    config = {}  # noqa: RUF012
    targets = LABELS
    extra = {}  # noqa: RUF012
    weights = np.ones((SAMPLES, LENGTH))  # what targets weigh in the loss, and in metrics
    counted = np.ones((SAMPLES, LENGTH))

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(INPUTS, CLASSES))

    def tf_model(self):
        import keras

        x = keras.Input((*X.shape[1:-1], INPUTS))
        return keras.Model(x, keras.layers.Dense(CLASSES, name="0")(x))


class Ignored(Tokens):
    """Targets that are left out."""

    targets = np.where(COUNTS, LABELS, -100)
    weights = counted = COUNTS


class IgnoredByOwnNumber(Ignored):
    """Targets that are left out by a number of the task's own, in a smoothed loss; weights of samples."""

    ignore_index = 255
    config = {"label_smoothing": 0.2}  # noqa: RUF012
    extra = {"weights": OF_SAMPLES}  # noqa: RUF012
    targets = np.where(COUNTS, LABELS, 255)
    weights = OF_SAMPLES[:, None] * COUNTS


class OfTargets(Ignored):
    """Weights of targets, of which some are left out; clipped."""

    extra = {"weights": OF_TARGETS}  # noqa: RUF012
    config = {"clip_norm": 0.05}  # noqa: RUF012
    weights = OF_TARGETS * COUNTS


class OfClasses(Ignored):
    """Weights of classes, one of which does not count; gradients travel as fp16."""

    class_weights = OF_CLASSES
    config = {"compression": "fp16"}  # noqa: RUF012
    weights = OF_CLASSES[LABELS] * COUNTS


class BatchMean(Ignored):
    """A loss and a metric that are means over the targets of a batch, and a metric per sample."""

    def torch_loss(self, model, batch):
        import torch
        from torch.nn import functional as F

        logits, targets = model(batch["inputs"]), batch["targets"]
        count = int((targets != -100).sum())
        total = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        right = (logits.argmax(-1) == targets).sum()
        mean = Weighted(total / max(count, 1), count)
        largest = logits.amax((1, 2))
        if torch.is_grad_enabled():
            torch.testing.assert_close(mean.values * count, total)
        return mean, {"accuracy": Weighted(right / max(count, 1), count), "largest": largest}

    def tf_loss(self, model, batch):
        import tensorflow as tf

        logits, targets = model(batch["inputs"]), batch["targets"]
        counted = tf.not_equal(targets, -100)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.where(counted, targets, 0), logits)
        count = tf.math.count_nonzero(counted)
        least = tf.cast(tf.maximum(count, 1), tf.float32)
        mean = Weighted(tf.reduce_sum(tf.where(counted, losses, 0.0)) / least, count)
        right = tf.math.count_nonzero(tf.equal(tf.argmax(logits, -1), targets), dtype=tf.float32)
        return mean, {"accuracy": Weighted(right / least, count), "largest": tf.reduce_max(logits, (1, 2))}


# its results depend on other workers in no way of their own
LOCAL_IGNORED = pytest.param(IgnoredByOwnNumber, marks=pytest.mark.local)
TASKS = [Ignored, OfTargets, OfClasses, BatchMean, LOCAL_IGNORED]


def build(backend, task, **fields):
    suite.build(backend, task, **{"momentum": 0.0, **getattr(task, "config", {}), **fields})
    return linear(backend)


def linear(backend):
    state = state_of(backend)
    return state["model/0/kernel"].astype(np.float64), state["model/0/bias"].astype(np.float64)


def part_of(backend, task, count, **fields):
    """Give this worker's part of some samples."""
    arrays = {"inputs": X, "targets": task.targets, **task.extra}
    return suite.on_device(backend, suite.host_batch(backend, arrays, count, **fields))


def reference(task, kernel, bias, count):
    """Give the full batch's mean gradient and means, in 64 bits."""
    x, labels = X[:count].astype(np.float64), LABELS[:count]
    weights, counted = task.weights[:count], task.counted[:count]
    logits = x @ kernel + bias
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    smoothing = task.config.get("label_smoothing", 0.0)
    wanted = (1 - smoothing) * np.eye(CLASSES)[labels] + smoothing / CLASSES
    error = (np.exp(logs) - wanted) * (weights / max(weights.sum(), 1e-30))[..., None]
    d_kernel, d_bias = np.einsum("sti,stc->ic", x, error), error.sum((0, 1))

    def mean(values, weights):
        return (values * weights).sum() / weights.sum()

    order = np.argsort(-logits, -1)
    means = {
        "loss": mean(-(wanted * logs).sum(-1), weights),
        "accuracy": mean(order[..., 0] == labels, counted),
        "top5": mean((order[..., :5] == labels[..., None]).any(-1), counted),
        "nll": mean(-np.take_along_axis(logs, labels[..., None], -1)[..., 0], counted),
        "largest": logits.max((1, 2)).mean(),
    }
    return d_kernel, d_bias, means


def clipped(task, d_kernel, d_bias):
    norm = np.sqrt((d_kernel**2).sum() + (d_bias**2).sum())
    factor = min(1.0, task.config.get("clip_norm", np.inf) / norm)
    assert factor < 1 or "clip_norm" not in task.config
    return d_kernel * factor, d_bias * factor


def assert_means(metrics, expected):
    assert len(metrics.sums) >= 3
    for name in metrics.sums.keys() - {"gradient_norm"}:
        assert metrics.mean(name) == pytest.approx(expected[name], rel=2e-5), name


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.__name__)
def test_a_step_applies_the_gradient_of_the_mean_over_what_counts(started, task):
    count, accumulate = 5, 2
    kernel, bias = build(started, task(), accumulate=accumulate)
    # of a larger batch, as the last of a run: with 3 workers, a micro-batch has no sample
    size = max(count, 4 * started.workers.size * accumulate)
    metrics = started.train_step(part_of(started, task, count, accumulate=accumulate, size=size), 0.5).read()
    *gradients, means = reference(task, kernel, bias, count)
    tolerance = 2e-3 if "compression" in task.config and started.workers.size > 1 else 2e-6
    for before, after, gradient in zip(
        (kernel, bias), linear(started), clipped(task, *gradients), strict=True
    ):
        np.testing.assert_allclose(
            before - after, 0.5 * gradient, atol=tolerance * np.abs(gradient).max() + 1e-7
        )
    assert metrics.weight == count
    assert_means(metrics, means)


@pytest.mark.parametrize("task", [LOCAL_IGNORED, BatchMean], ids=lambda task: task.__name__)
def test_an_evaluation_has_the_means_over_what_counts(started, task):
    kernel, bias = build(started, task())
    size, count, partial = 3 * started.workers.size, SAMPLES - 1, None
    for start in range(0, count, size):
        part = part_of(started, task, min(size, count - start), start=start, size=size)
        partial = started.eval_step(part, partial)
    plain = type("Plain", (task,), {"config": {}})  # evaluations do not smooth
    assert_means(started.eval_metrics(partial).read(), reference(plain, kernel, bias, count)[2])


@pytest.mark.parametrize("task", [LOCAL_IGNORED, BatchMean], ids=lambda task: task.__name__)
def test_a_step_in_which_nothing_counts_changes_nothing_and_has_no_loss(started, task):
    kernel, bias = build(started, task())
    metrics = started.train_step(part_of(started, task, 3, size=max(3, started.workers.size)), 0.5).read()
    for before, after in zip((kernel, bias), linear(started), strict=True):
        np.testing.assert_array_equal(before, after)
    assert (metrics.sums["loss"], metrics.weights["loss"], metrics.weight) == (0, 0, 3)
    assert np.isnan(metrics.mean("loss"))


class WrongShape(BatchMean):
    """A weight for each target."""

    def torch_loss(self, model, batch):
        return Weighted(model(batch["inputs"]).mean((1, 2)), batch["inputs"][..., 0]), {}

    def tf_loss(self, model, batch):
        import tensorflow as tf

        return Weighted(tf.reduce_mean(model(batch["inputs"]), (1, 2)), batch["inputs"][..., 0]), {}


class TooFewClasses(Tokens):
    class_weights = OF_CLASSES[:-1]


class WeightsOfAnotherShape(Tokens):
    extra = {"weights": OF_TARGETS[:, :2]}  # noqa: RUF012


@pytest.mark.parametrize(
    ("task", "said"),
    [
        (WrongShape, "the loss is Weighted: values and weights must both have the shape"),
        (TooFewClasses, "class_weights has 6 numbers; the model's outputs have 7 classes"),
        (WeightsOfAnotherShape, r"cross_entropy takes batch\['weights'\] per sample"),
    ],
)
def test_what_does_not_fit_is_refused(started, task, said):
    build(started, task())
    batch = part_of(started, task, 12)
    with pytest.raises(TaskError, match=said):
        started.train_step(batch, 0.5)
