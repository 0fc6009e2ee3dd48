"""Metrics of a whole evaluation against scikit-learn, torchmetrics and Keras; and what is refused."""

import warnings
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics as reference

import hvdtrain
from hvdtrain.backends.objective import metric_objects
from hvdtrain.backends.objective.evaluation_metrics import EvaluationMetrics
from hvdtrain.backends.objective.stateful_metrics import Rows, RowsState
from hvdtrain.errors import TaskError

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")
keras = pytest.importorskip("keras")
torchmetrics = pytest.importorskip("torchmetrics")
classification, regression = torchmetrics.classification, torchmetrics.regression

RANDOM = np.random.RandomState(3)
SAMPLES = 53


def side_of(framework, tensor):
    module = import_module(f"hvdtrain.backends.{framework}.objective.losses")
    return SimpleNamespace(functions=module.FUNCTIONS, tensor=tensor, module=module)


# loaded here, since loading TensorFlow changes the environment
OF_TORCH = side_of("torch", lambda array: torch.from_numpy(np.array(array)))
OF_KERAS = side_of("tensorflow", tf.constant)
SIDES = {"torch": OF_TORCH, "tf": OF_KERAS}


@pytest.fixture(params=SIDES)
def side(request):
    return SIDES[request.param]


def evaluation(side, loss, metrics, **task):
    return EvaluationMetrics(SimpleNamespace(loss=loss, metrics=metrics, **task), side.functions)


def rows(indices, size, total=SAMPLES):
    """Give the rows of some samples in a batch of ``size``, whose rest is padding."""
    padding = np.zeros(size - len(indices), np.int64)
    return Rows(np.arange(size) < len(indices), np.concatenate([indices, padding]), total)


def copy(metric):
    """Give an object of its own to a worker that shares this process."""
    if isinstance(metric, keras.metrics.Metric) and type(metric).__module__.startswith("keras."):
        return metric.from_config(metric.get_config())
    return metric


def state_of(side, metric, loss="mse", **task):
    return evaluation(side, loss, {"it": copy(metric)}, **task)._states["it"]


def value(side, metric, outputs, targets, loss="cross_entropy", **task):
    """Return what a metric computes over three workers, whose last batches are padded."""
    states = [state_of(side, metric, loss, **task) for _ in range(3)]
    for first in range(0, len(outputs), 15):
        for rank, state in enumerate(states):
            own = np.arange(first + 5 * rank, min(first + 5 * rank + 5, len(outputs)))
            places = rows(own, 5, len(outputs))
            given = side.tensor(np.float32(outputs)[places.indices])
            state.add(given, {"targets": side.tensor(targets[places.indices])}, places)
    return states[0].value([state.parts() for state in states])


AVERAGED = {
    "precision": reference.precision_score,
    "recall": reference.recall_score,
    "f1": reference.f1_score,
    "mean_iou": reference.jaccard_score,
}


def expected(name, targets, predicted, average):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = AVERAGED[name](targets, predicted, average=average, zero_division=0)
    return pytest.approx(found, abs=1e-12)


@pytest.mark.parametrize("name", AVERAGED)
def test_of_classes_that_occur_and_of_labels_the_mean_of_one_label_that_of_the_positive_class(side, name):
    logits = RANDOM.randn(SAMPLES, 6)
    logits[:, 4:] -= 50  # two classes are never predicted
    targets = RANDOM.randint(0, 5, SAMPLES)  # and one does not occur
    assert value(side, name, logits, targets) == expected(name, targets, logits.argmax(1), "macro")
    logits, targets = RANDOM.randn(SAMPLES, 1), RANDOM.randint(0, 2, SAMPLES)
    found = value(side, name, logits, targets, "binary_cross_entropy")
    assert found == expected(name, targets, logits[:, 0] > 0, "binary")
    assert found == value(side, name, logits, targets[:, None].astype(np.float32), lambda o, b: 0)
    if name != "mean_iou":
        logits, targets = RANDOM.randn(SAMPLES, 4), RANDOM.randint(0, 2, (SAMPLES, 4))
        logits[:, 1], targets[:, 2] = -1, 0  # never predicted, never there
        found = value(side, name, logits, targets, "binary_cross_entropy")
        assert found == expected(name, targets, logits > 0, "macro")


@pytest.mark.parametrize("class_axis", [1, -1])
def test_images_of_classes_with_ignored_pixels(side, class_axis):
    logits, targets = RANDOM.randn(10, 4, 5, 3), RANDOM.randint(0, 3, (10, 4, 5))
    targets[:, 1] = 255
    counted = targets != 255
    predicted = logits.argmax(-1)
    given = np.moveaxis(logits, -1, 1) if class_axis == 1 else logits
    for name in AVERAGED:
        found = value(side, name, given, np.uint8(targets), ignore_index=255, class_axis=class_axis)
        assert found == expected(name, targets[counted], predicted[counted], "macro")


def test_a_mask_is_one_label_and_other_shapes_must_say_the_axis(side):
    logits, targets = RANDOM.randn(10, 1, 4, 4), RANDOM.randint(0, 2, (10, 4, 4))
    found = value(side, "mean_iou", logits, targets, "binary_cross_entropy")
    assert found == expected("mean_iou", targets.ravel(), logits.ravel() > 0, "binary")
    squeezed = logits[:, 0]
    with pytest.raises(TaskError, match="cannot tell which axis holds the labels"):
        value(side, "mean_iou", squeezed, targets, "binary_cross_entropy")
    of_labels = value(side, "f1", squeezed, targets, "binary_cross_entropy", class_axis=-1)
    flat = targets.reshape(-1, 4), squeezed.reshape(-1, 4) > 0
    assert of_labels == expected("f1", *flat, "macro")


def test_auc_of_classes_and_labels(side):
    logits, targets = np.float32(RANDOM.randn(SAMPLES, 3)), RANDOM.randint(0, 3, SAMPLES)
    shares = np.exp(logits, dtype=np.float64)
    shares /= shares.sum(1, keepdims=True)
    wanted = reference.roc_auc_score(targets, shares, multi_class="ovr")
    assert value(side, "auc", logits, targets) == pytest.approx(wanted, abs=1e-12)
    logits, targets = logits.round(1), np.float32(RANDOM.rand(SAMPLES, 3) > 0.6)
    wanted = reference.roc_auc_score(targets, logits)  # with ties
    assert value(side, "auc", logits, targets, "binary_cross_entropy") == pytest.approx(wanted, abs=1e-12)
    targets[:, 0] = 1  # has no area, and is left out
    wanted = reference.roc_auc_score(targets[:, 1:], logits[:, 1:])
    assert value(side, "auc", logits, targets, "binary_cross_entropy") == pytest.approx(wanted, abs=1e-12)
    assert np.isnan(value(side, "auc", logits[:, 0], targets[:, 0], "binary_cross_entropy"))
    logits[0] = np.nan
    assert np.isnan(value(side, "auc", logits, targets, "binary_cross_entropy"))


def test_r2_keeps_the_digits_of_large_targets(side):
    outputs, targets = RANDOM.randn(SAMPLES, 2), RANDOM.randn(SAMPLES, 2)
    wanted = reference.r2_score(targets, np.float32(outputs))
    assert value(side, "r2", outputs, targets, "mse") == pytest.approx(wanted, abs=1e-9)
    large = np.round(targets[:, 0] * 2**10) + 2.0**23  # whole numbers that fp32 has
    wanted = reference.r2_score(large, np.float32(large + 3))
    assert value(side, "r2", large + 3, large, "mse") == pytest.approx(wanted, abs=1e-9)
    assert value(side, "r2", np.ones(5), np.ones(5), "mse") == 1
    assert value(side, "r2", np.zeros(5), np.ones(5), "mse") == 0
    assert np.isnan(value(side, "r2", np.ones(3), np.float32([1, np.nan, 2]), "mse"))
    assert np.isnan(value(side, "r2", np.ones(1), np.ones(1), "mse"))


def test_rows_that_are_broadcast_over_the_batch_are_refused(side):
    """(n, 1) with (n,), also as the means over the other samples, which are a row each."""
    numbers = np.float32(RANDOM.randn(8))

    def update(outputs, batch):
        apart = side.functions.to_numpy(abs(outputs - batch["targets"]))
        return {"apart": apart.mean(1) if apart.ndim == 2 else apart}

    def tried(outputs):
        metric = hvdtrain.GatheredMetric(update, lambda one: one["apart"].mean())
        metrics = evaluation(side, "mse", {"it": metric})
        metrics.try_out((side.tensor(outputs), {"targets": side.tensor(numbers)}), rows(np.arange(8), 8))
        return metrics.tried["it"]

    with pytest.raises(TaskError, match=r"the other samples .*\(8, 1\) and \(8,\) are broadcast to \(8, 8\)"):
        tried(np.float32(RANDOM.randn(8, 1)))
    assert tried(numbers + 1) == pytest.approx(1, rel=1e-6)


def number(_):
    return 1.0


def outputs_as_they_are(outputs, _):
    return {"a": outputs}


def mean_of(outputs, _):
    return {"a": tf.reduce_sum(outputs) if tf.is_tensor(outputs) else outputs.sum()}


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (hvdtrain.SumMetric(mean_of, number), "(8, ...); found float32 () for 'a'"),
        (hvdtrain.SumMetric(outputs_as_they_are, lambda sums: sums["a"]), "one number; found float64 (2,)"),
    ],
)
def test_a_trial_names_what_is_wrong(side, metric, said):
    metrics = evaluation(side, "cross_entropy", {"bad": metric})
    outputs, targets = side.tensor(np.ones((8, 2), np.float32)), side.tensor(np.zeros(8, np.int64))
    with pytest.raises(TaskError, match=r"metrics\['bad'\]") as caught:
        metrics.try_out((outputs, {"targets": targets}), rows(np.arange(8), 8, 1_000_000))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("loss", "targets", "said"),
    [
        ("cross_entropy", np.array([0, -100]), "give the task their number as ignore_index"),
        ("binary_cross_entropy", np.float32([[0, 1], [2, 0]]), "targets must be 0 or 1"),
        ("mse", np.float32([[0, 1], [1, 0]]), "takes logits, and the task's loss is mse"),
    ],
)
def test_wrong_targets_are_refused(side, loss, targets, said):
    for name in ("f1", "auc"):
        with pytest.raises(TaskError, match=said):
            value(side, name, np.eye(2), targets, loss)


def test_workers_whose_rows_differ_are_refused(side):
    of_workers = []
    for numbers in (2, 3):
        state = RowsState("m", hvdtrain.GatheredMetric(outputs_as_they_are, number), side.functions.to_numpy)
        state.add(side.tensor(np.ones((4, numbers), np.float32)), {}, rows(np.arange(4), 4))
        of_workers.append(state.parts())
    with pytest.raises(TaskError, match=r"metrics\['m'\]: update returned .*\(2,\).* and .*\(3,\)"):
        state.value(of_workers)


CLASSES = 3
LOGITS = RANDOM.randn(SAMPLES, CLASSES).astype("float32") * 2
LABELS = RANDOM.randint(0, CLASSES, SAMPLES)
ONE_HOT = np.eye(CLASSES, dtype="float32")[LABELS]
SCORES = RANDOM.randn(SAMPLES).astype("float32")
YES = (RANDOM.rand(SAMPLES) < 0.4).astype("float32")
MANY = (RANDOM.rand(SAMPLES, CLASSES) < 0.4).astype("float32")
NUMBERS = RANDOM.randn(SAMPLES, 2).astype("float32") + 3


def softmax(array):
    return np.exp(array) / np.exp(array).sum(-1, keepdims=True)


def by_torchmetrics(metric, preds, targets):
    metric = metric.clone()
    metric.update(torch.from_numpy(np.array(preds)), torch.from_numpy(np.array(targets)))
    return pytest.approx(float(metric.compute()), rel=1e-5)


BCE, CE = "binary_cross_entropy", "cross_entropy"
TORCHMETRICS = {
    "auroc of logits": (classification.BinaryAUROC(), BCE, SCORES, YES),
    "labels": (classification.MultilabelAUROC(CLASSES), BCE, LOGITS, MANY),
    "classes": (classification.MulticlassF1Score(CLASSES), CE, LOGITS, LABELS),
    "calibration": (classification.MulticlassCalibrationError(CLASSES), CE, LOGITS, LABELS),
    "composed": (regression.MeanSquaredError() + regression.MeanAbsoluteError(), "mse", SCORES, YES),
    "axis of length 1": (regression.MeanAbsoluteError(), "mse", SCORES[:, None], YES),
}


@pytest.mark.parametrize("name", TORCHMETRICS)
def test_torchmetrics_over_workers(name):
    metric, loss, outputs, targets = TORCHMETRICS[name]
    given = outputs.reshape(targets.shape) if outputs.size == targets.size else outputs
    wanted = targets if loss == "mse" else targets.astype("int64")
    assert value(OF_TORCH, metric, outputs, targets, loss) == by_torchmetrics(metric, given, wanted)


def test_a_worker_without_samples_does_not_matter():
    # of these, the states get their shape in the first update
    few, targets = NUMBERS[:4], NUMBERS[:4] + LOGITS[:4, :2] / 9
    for side, metric, alone in (
        (OF_TORCH, regression.ExplainedVariance(), regression.ExplainedVariance()),
        (OF_KERAS, keras.metrics.R2Score(), regression.R2Score()),
    ):
        assert value(side, metric, few, targets, "mse") == by_torchmetrics(alone, few, targets)


OF_TOKENS, TOKENS = RANDOM.randn(12, CLASSES, 4).astype("float32"), RANDOM.randint(0, CLASSES, (12, 4))
ACCURACY = keras.metrics.SparseCategoricalAccuracy
KERAS_METRICS = {
    "auc of logits": (keras.metrics.AUC(), BCE, SCORES, YES, lambda array: 1 / (1 + np.exp(-array))),
    "auc that takes logits": (keras.metrics.AUC(from_logits=True), BCE, SCORES, YES, None),
    "threshold of logits": (keras.metrics.Precision(thresholds=0.0), BCE, SCORES, YES, None),
    "classes": (ACCURACY(), CE, LOGITS, LABELS, softmax),
    "one-hot": (keras.metrics.F1Score(average="macro"), CE, LOGITS, ONE_HOT, softmax),
    "axis 1": (ACCURACY(), CE, OF_TOKENS, TOKENS, lambda array: np.moveaxis(array, 1, -1)),
    "iou": (keras.metrics.MeanIoU(CLASSES, sparse_y_pred=False), CE, LOGITS, LABELS, softmax),
}


@pytest.mark.parametrize("name", KERAS_METRICS)
def test_keras_over_workers(name):
    metric, loss, outputs, targets, prepared = KERAS_METRICS[name]
    alone = copy(metric)
    alone.update_state(targets, outputs if prepared is None else prepared(outputs))
    expected = float(alone.result())
    assert value(OF_KERAS, metric, outputs, targets, loss) == pytest.approx(expected, rel=1e-6)


def test_classes_on_the_last_axis_are_moved_for_torchmetrics():
    outputs = RANDOM.randn(12, 4, CLASSES).astype("float32")
    targets = RANDOM.randint(0, CLASSES, (12, 4))
    metric = classification.MulticlassAccuracy(CLASSES, average="micro")
    expected = (outputs.argmax(-1) == targets).mean()
    assert value(OF_TORCH, metric, outputs, targets) == pytest.approx(expected)
    square = RANDOM.randn(12, CLASSES, CLASSES).astype("float32")
    with pytest.raises(TaskError, match="cannot tell which axis"):
        value(OF_TORCH, metric, square, targets[:, :CLASSES])


FIT, SQUARED = ("mse", SCORES, YES), regression.MeanSquaredError()
NOT_ALL = np.where(SCORES.min() < SCORES, SCORES, np.nan)
REFUSED = {
    "collection": ("torch", torchmetrics.MetricCollection([SQUARED]), *FIT, "is no single number"),
    "aggregator": ("tf", keras.metrics.Mean(), *FIT, "is no single number"),
    "function": (
        "torch",
        hvdtrain.MetricObject(torch=lambda: {}["threshold"]),
        *FIT,
        "cannot be constructed",
    ),
    "other framework": ("tf", SQUARED, *FIT, "an object of Keras, as this"),
    "logits or not": ("torch", classification.BinaryAUROC(), *FIT, r"outside of \[0, 1\]"),
    "no number": ("tf", keras.metrics.BinaryAccuracy(), BCE, NOT_ALL, YES, r"outside of \[0, 1\]"),
    "one-hot or not": ("tf", keras.metrics.CategoricalAccuracy(), CE, LOGITS, LABELS, "compares arrays"),
    "probabilities": ("tf", keras.metrics.Accuracy(), BCE, SCORES, YES, "takes class numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_wrong_is_refused(name):
    framework, metric, loss, outputs, targets, said = REFUSED[name]
    with pytest.raises(TaskError, match=said):
        value(SIDES[framework], metric, outputs, targets, loss)


def test_targets_that_the_loss_ignores_are_refused_or_left_to_an_object_that_knows_them():
    metric = ACCURACY()
    with pytest.raises(TaskError, match="is given targets of -1, which the loss leaves out"):
        value(OF_KERAS, metric, LOGITS, LABELS - 1, ignore_index=-1)
    labels = np.where(np.arange(SAMPLES) % 4 == 0, -100, LABELS)
    metric = classification.MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100)
    expected = (LOGITS.argmax(-1) == labels)[labels >= 0].mean()
    assert value(OF_TORCH, metric, LOGITS, labels, ignore_index=-100) == pytest.approx(expected)


def test_keras_counts_no_more_than_the_24_bits_of_its_variables(monkeypatch):
    monkeypatch.setattr(OF_KERAS.module, "_MOST_COUNTED", SAMPLES - 1)
    with pytest.raises(TaskError, match="which Keras cannot count in float32"):
        value(OF_KERAS, keras.metrics.MeanAbsoluteError(), SCORES, YES, "mse")
    found = value(OF_KERAS, keras.metrics.MeanAbsoluteError(dtype="float64"), SCORES, YES, "mse")
    assert found == pytest.approx(np.abs(SCORES - YES).mean(), rel=1e-6)


def test_many_numbers_are_given_in_parts(monkeypatch):
    monkeypatch.setattr(metric_objects, "_MOST_NUMBERS", 20)
    metric = regression.SpearmanCorrCoef()
    expected = by_torchmetrics(metric, SCORES, SCORES + YES)
    assert value(OF_TORCH, metric, SCORES, SCORES + YES, "mse") == expected


def test_a_mask_of_keras_leaves_out_what_it_hides():
    outputs, targets = NUMBERS[:6], NUMBERS[:6] + 1
    targets[2:4] += 7
    mask = np.ones(outputs.shape, bool)
    mask[2:4] = False
    state = state_of(OF_KERAS, keras.metrics.MeanAbsoluteError())
    masked = OF_KERAS.module.with_mask(tf.constant(outputs[..., None]), tf.constant(mask))
    state.add(masked, {"targets": tf.constant(targets[..., None])}, rows(np.arange(6), 6, 6))
    assert state.value([state.parts()]) == pytest.approx(1, rel=1e-5)
