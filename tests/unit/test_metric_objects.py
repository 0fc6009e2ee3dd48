"""Objects of torchmetrics and Keras: over workers they give what one object gives for all samples."""

from types import SimpleNamespace

import numpy as np
import pytest

import hvdtrain
from hvdtrain.backends.objective import metric_objects
from hvdtrain.backends.objective.evaluation_metrics import EvaluationMetrics
from hvdtrain.backends.objective.stateful_metrics import Rows
from hvdtrain.errors import TaskError

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
torchmetrics = pytest.importorskip("torchmetrics")
of_torchmetrics = pytest.importorskip("hvdtrain.backends.torch.objective.losses")
of_keras = pytest.importorskip("hvdtrain.backends.tensorflow.objective.losses")
classification, regression = torchmetrics.classification, torchmetrics.regression

RANDOM = np.random.RandomState(7)
SAMPLES, CLASSES = 53, 3
LOGITS = RANDOM.randn(SAMPLES, CLASSES).astype("float32") * 2
LABELS = RANDOM.randint(0, CLASSES, SAMPLES)
ONE_HOT = np.eye(CLASSES, dtype="float32")[LABELS]
SCORES = RANDOM.randn(SAMPLES).astype("float32")
YES = (RANDOM.rand(SAMPLES) < 0.4).astype("float32")
MANY = (RANDOM.rand(SAMPLES, CLASSES) < 0.4).astype("float32")
NUMBERS = RANDOM.randn(SAMPLES, 2).astype("float32") + 3


def side_of(framework):
    if framework == "torch":
        return of_torchmetrics.FUNCTIONS, lambda array: torch.from_numpy(np.array(array))
    return of_keras.FUNCTIONS, tf.constant


def states_of(framework, metric, loss="mse", **task):
    task = SimpleNamespace(loss=loss, metrics={"it": metric}, **task)
    return EvaluationMetrics(task, side_of(framework)[0])._states["it"]


def evaluated(framework, metric, data, loss="mse", workers=3, **task):
    """Give what a metric computes over several workers, whose last batches are padded."""
    tensor, (outputs, targets), batch = side_of(framework)[1], data, 5
    states = [states_of(framework, copy(metric), loss, **task) for _ in range(workers)]
    for first in range(0, len(outputs), workers * batch):
        for rank in range(workers):
            indices = first + rank * batch + np.arange(batch)
            counted = indices < len(outputs)
            rows = Rows(counted, np.where(counted, indices, 0), len(outputs))
            given = {"targets": tensor(targets[rows.indices]), "others": tensor(outputs[rows.indices])}
            states[rank].add(tensor(outputs[rows.indices]), given, rows)
    return states[0].value([of_rank.parts() for of_rank in states])


def copy(metric):
    """Give an object of its own to a worker that shares this process."""
    if isinstance(metric, keras.metrics.Metric) and type(metric).__module__.startswith("keras."):
        return metric.from_config(metric.get_config())
    return metric


def sigmoid(array):
    return 1 / (1 + np.exp(-array))


def softmax(array):
    return np.exp(array) / np.exp(array).sum(-1, keepdims=True)


def by_torchmetrics(metric, preds, targets):
    metric = metric.clone()
    metric.update(torch.from_numpy(np.array(preds)), torch.from_numpy(np.array(targets)))
    return float(metric.compute())


BCE, CE = "binary_cross_entropy", "cross_entropy"
TORCH = {
    "auroc of logits": (classification.BinaryAUROC(), BCE, SCORES, YES),
    "labels": (classification.MultilabelAUROC(CLASSES), BCE, LOGITS, MANY),
    "classes": (classification.MulticlassF1Score(CLASSES), CE, LOGITS, LABELS),
    "calibration": (classification.MulticlassCalibrationError(CLASSES), CE, LOGITS, LABELS),
    "composed": (regression.MeanSquaredError() + regression.MeanAbsoluteError(), "mse", SCORES, YES),
    "axis of length 1": (regression.MeanAbsoluteError(), "mse", SCORES[:, None], YES),
}


@pytest.mark.parametrize("name", TORCH)
def test_torchmetrics_over_workers(name):
    metric, loss, outputs, targets = TORCH[name]
    given = outputs.reshape(targets.shape) if outputs.size == targets.size else outputs
    wanted = targets if loss == "mse" else targets.astype("int64")
    expected = by_torchmetrics(metric, given, wanted)
    assert evaluated("torch", metric, (outputs, targets), loss) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("framework", ["torch", "tf"])
def test_a_worker_without_samples_does_not_matter(framework):
    # of which the states get their shape in the first update
    metric = {"torch": regression.ExplainedVariance, "tf": keras.metrics.R2Score}[framework]
    few, targets = NUMBERS[:4], NUMBERS[:4] + LOGITS[:4, :2]
    expected = by_torchmetrics((regression.R2Score if framework == "tf" else metric)(), few, targets)
    of_one, of_other = (states_of(framework, metric()) for _ in range(2))
    tensor = side_of(framework)[1]
    for state, counts in ((of_one, True), (of_other, False)):
        rows = Rows(np.full(4, counts), np.arange(4), 4)
        state.add(tensor(few), {"targets": tensor(targets)}, rows)
    found = of_other.value([of_other.parts(), of_one.parts()])
    assert found == pytest.approx(expected, rel=1e-6)


OF_TOKENS, TOKENS = RANDOM.randn(12, CLASSES, 4).astype("float32"), RANDOM.randint(0, CLASSES, (12, 4))
KERAS = {
    "auc of logits": (keras.metrics.AUC(), BCE, SCORES, YES, sigmoid),
    "auc that takes logits": (keras.metrics.AUC(from_logits=True), BCE, SCORES, YES, None),
    "threshold of logits": (keras.metrics.Precision(thresholds=0.0), BCE, SCORES, YES, None),
    "classes": (keras.metrics.SparseCategoricalAccuracy(), CE, LOGITS, LABELS, softmax),
    "one-hot": (keras.metrics.F1Score(average="macro"), CE, LOGITS, ONE_HOT, softmax),
    "axis 1": (
        keras.metrics.SparseCategoricalAccuracy(),
        CE,
        OF_TOKENS,
        TOKENS,
        lambda a: np.moveaxis(a, 1, -1),
    ),
    "iou": (keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False), CE, LOGITS, LABELS, softmax),
}


@pytest.mark.parametrize("name", KERAS)
def test_keras_over_workers(name):
    metric, loss, outputs, targets, prepared = KERAS[name]
    alone = copy(metric)
    alone.update_state(targets, outputs if prepared is None else prepared(outputs))
    expected = float(alone.result())
    assert evaluated("tf", metric, (outputs, targets), loss) == pytest.approx(expected, rel=1e-6)


def test_classes_on_the_last_axis_are_moved_for_torchmetrics():
    outputs = RANDOM.randn(12, 4, CLASSES).astype("float32")
    targets = RANDOM.randint(0, CLASSES, (12, 4))
    metric = classification.MulticlassAccuracy(CLASSES, average="micro")
    expected = (outputs.argmax(-1) == targets).mean()
    assert evaluated("torch", metric, (outputs, targets), "cross_entropy") == pytest.approx(expected)
    square = RANDOM.randn(12, CLASSES, CLASSES).astype("float32")
    with pytest.raises(TaskError, match="cannot tell which axis"):
        evaluated("torch", metric, (square, targets[:, :CLASSES]), "cross_entropy")


def made_wrong():
    raise KeyError("threshold")


FIT = ("mse", SCORES, YES)
NOT_ALL = np.where(SCORES.min() < SCORES, SCORES, np.nan)
COLLECTION = torchmetrics.MetricCollection([regression.MeanSquaredError()])
REFUSED = {
    "collection": ("torch", COLLECTION, *FIT, "is no single number"),
    "aggregator": ("tf", keras.metrics.Mean(), *FIT, "is no single number"),
    "function": ("torch", hvdtrain.MetricObject(torch=made_wrong), *FIT, "cannot be constructed"),
    "other framework": ("tf", regression.MeanSquaredError(), *FIT, "an object of Keras, as this"),
    "logits or not": ("torch", classification.BinaryAUROC(), *FIT, r"outside of \[0, 1\]"),
    "no number": ("tf", keras.metrics.BinaryAccuracy(), BCE, NOT_ALL, YES, r"outside of \[0, 1\]"),
    "one-hot or not": ("tf", keras.metrics.CategoricalAccuracy(), CE, LOGITS, LABELS, "compares arrays"),
    "probabilities": ("tf", keras.metrics.Accuracy(), BCE, SCORES, YES, "takes class numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name):
    framework, metric, loss, outputs, targets, said = REFUSED[name]
    with pytest.raises(TaskError, match=said):
        evaluated(framework, metric, (outputs, targets), loss)


def test_targets_that_the_loss_ignores_are_refused_or_left_to_an_object_that_knows_them():
    metric = keras.metrics.SparseCategoricalAccuracy()
    with pytest.raises(TaskError, match="is given targets of -1, which the loss leaves out"):
        evaluated("tf", metric, (LOGITS, LABELS - 1), CE, ignore_index=-1)
    labels = np.where(np.arange(SAMPLES) % 4 == 0, -100, LABELS)
    metric = classification.MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100)
    expected = (LOGITS.argmax(-1) == labels)[labels >= 0].mean()
    assert evaluated("torch", metric, (LOGITS, labels), CE, ignore_index=-100) == pytest.approx(expected)


def test_keras_counts_no_more_than_the_24_bits_of_its_variables(monkeypatch):
    monkeypatch.setattr(of_keras, "_MOST_COUNTED", SAMPLES - 1)
    with pytest.raises(TaskError, match="which Keras cannot count in float32"):
        evaluated("tf", keras.metrics.MeanAbsoluteError(), (SCORES, YES))
    found = evaluated("tf", keras.metrics.MeanAbsoluteError(dtype="float64"), (SCORES, YES))
    assert found == pytest.approx(np.abs(SCORES - YES).mean(), rel=1e-6)


def test_many_numbers_are_given_in_parts(monkeypatch):
    monkeypatch.setattr(metric_objects, "_MOST_NUMBERS", 20)
    metric = regression.SpearmanCorrCoef()
    expected = by_torchmetrics(metric, SCORES, SCORES + YES)
    assert evaluated("torch", metric, (SCORES, SCORES + YES)) == pytest.approx(expected)


def test_a_mask_of_keras_leaves_out_what_it_hides():
    from hvdtrain.backends.tensorflow.objective.losses import with_mask

    outputs, targets = NUMBERS[:6], NUMBERS[:6] + 1
    targets[2:4] += 7
    mask = np.ones(outputs.shape, bool)
    mask[2:4] = False
    state = states_of("tf", keras.metrics.MeanAbsoluteError())
    rows = Rows(np.ones(6, bool), np.arange(6), 6)
    masked = with_mask(tf.constant(outputs[..., None]), tf.constant(mask))
    state.add(masked, {"targets": tf.constant(targets[..., None])}, rows)
    assert state.value([state.parts()]) == pytest.approx(1, rel=1e-5)
