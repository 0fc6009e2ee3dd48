"""Metrics of a whole evaluation in both frameworks, against scikit-learn; and what is refused."""

import warnings
from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.metrics as reference

import hvdtrain
from hvdtrain.backends.objective.evaluation_metrics import EvaluationMetrics
from hvdtrain.backends.objective.stateful_metrics import Rows, RowsState
from hvdtrain.errors import TaskError

torch = pytest.importorskip("torch")
tf = pytest.importorskip("tensorflow")

RANDOM = np.random.RandomState(3)
SAMPLES = 53
ALONE = SimpleNamespace(rank=0, size=1, broadcast_object=lambda v: v, allgather_object=lambda v: [v])


def functions_of(framework):
    return import_module(f"hvdtrain.backends.{framework}.objective.losses").FUNCTIONS


# loaded here, since loading TensorFlow changes the environment
SIDES = {
    "torch": SimpleNamespace(
        name="torch", functions=functions_of("torch"), tensor=lambda a: torch.from_numpy(np.array(a))
    ),
    "tf": SimpleNamespace(name="tf", functions=functions_of("tensorflow"), tensor=tf.constant),
}


@pytest.fixture(params=SIDES)
def side(request):
    return SIDES[request.param]


def evaluation(side, loss, metrics, **task):
    return EvaluationMetrics(SimpleNamespace(loss=loss, metrics=metrics, **task), side.functions)


def rows(indices, size, total=SAMPLES):
    """Give the rows of some samples in a batch of ``size``, whose rest is padding."""
    padding = np.zeros(size - len(indices), np.int64)
    return Rows(np.arange(size) < len(indices), np.concatenate([indices, padding]), total)


def value(side, name, outputs, targets, loss="cross_entropy", **task):
    """Return a metric of all samples, added in batches of which the last is padded."""
    metrics, order = evaluation(side, loss, {"it": name}, **task), np.arange(len(outputs))
    metrics.begin()
    for first in range(0, len(order), 8):
        places = rows(order[first : first + 8], 8, len(outputs))
        given, wanted = side.tensor(np.float32(outputs)[places.indices]), side.tensor(targets[places.indices])
        metrics.add((given, {"targets": wanted}), places)
    return metrics.computed(ALONE)["it"]


AVERAGED = {
    "precision": reference.precision_score,
    "recall": reference.recall_score,
    "f1": reference.f1_score,
    "mean_iou": reference.jaccard_score,
}


def expected(name, targets, predicted, average):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return AVERAGED[name](targets, predicted, average=average, zero_division=0)


@pytest.mark.parametrize("name", AVERAGED)
def test_of_classes_the_mean_over_those_that_occur(side, name):
    logits = RANDOM.randn(SAMPLES, 6)
    logits[:, 4:] -= 50  # two classes are never predicted
    targets = RANDOM.randint(0, 5, SAMPLES)  # and one does not occur
    assert value(side, name, logits, targets) == pytest.approx(
        expected(name, targets, logits.argmax(1), "macro"), abs=1e-12
    )


@pytest.mark.parametrize("name", AVERAGED)
def test_of_one_label_that_of_the_positive_class(side, name):
    logits, targets = RANDOM.randn(SAMPLES, 1), RANDOM.randint(0, 2, SAMPLES)
    found = value(side, name, logits, targets, "binary_cross_entropy")
    assert found == pytest.approx(expected(name, targets, logits[:, 0] > 0, "binary"), abs=1e-12)
    assert found == value(side, name, logits, targets[:, None].astype(np.float32), lambda o, b: 0)


@pytest.mark.parametrize("name", ["precision", "recall", "f1"])
def test_of_labels_the_mean_over_all(side, name):
    logits, targets = RANDOM.randn(SAMPLES, 4), RANDOM.randint(0, 2, (SAMPLES, 4))
    logits[:, 1], targets[:, 2] = -1, 0  # never predicted, never there
    found = value(side, name, logits, targets, "binary_cross_entropy")
    assert found == pytest.approx(expected(name, targets, logits > 0, "macro"), abs=1e-12)


@pytest.mark.parametrize("class_axis", [1, -1])
def test_images_of_classes_with_ignored_pixels(side, class_axis):
    logits, targets = RANDOM.randn(10, 4, 5, 3), RANDOM.randint(0, 3, (10, 4, 5))
    targets[:, 1] = 255
    counted = targets != 255
    predicted = logits.argmax(-1)
    given = np.moveaxis(logits, -1, 1) if class_axis == 1 else logits
    task = {"ignore_index": 255, "class_axis": class_axis}
    for name in AVERAGED:
        found = value(side, name, given, targets.astype(np.uint8), **task)
        assert found == pytest.approx(
            expected(name, targets[counted], predicted[counted], "macro"), abs=1e-12
        )


def test_a_mask_is_one_label_and_other_shapes_must_say_the_axis(side):
    logits, targets = RANDOM.randn(10, 1, 4, 4), RANDOM.randint(0, 2, (10, 4, 4))
    found = value(side, "mean_iou", logits, targets, "binary_cross_entropy")
    assert found == pytest.approx(expected("mean_iou", targets.ravel(), logits.ravel() > 0, "binary"))
    squeezed = logits[:, 0]
    with pytest.raises(TaskError, match="cannot tell which axis holds the labels"):
        value(side, "mean_iou", squeezed, targets, "binary_cross_entropy")
    of_labels = value(side, "f1", squeezed, targets, "binary_cross_entropy", class_axis=-1)
    flat = targets.reshape(-1, 4), squeezed.reshape(-1, 4) > 0
    assert of_labels == pytest.approx(expected("f1", *flat, "macro"), abs=1e-12)


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


SUM, GATHERED = hvdtrain.SumMetric, hvdtrain.GatheredMetric


def outputs_as_they_are(outputs, _):
    return {"a": outputs}


def mean_of(outputs, _):
    return {"a": tf.reduce_sum(outputs) if tf.is_tensor(outputs) else outputs.sum()}


@pytest.mark.parametrize(
    ("metric", "said"),
    [
        (SUM(mean_of, number), "(8, ...); found float32 () for 'a'"),
        (SUM(outputs_as_they_are, lambda sums: sums["a"]), "one number; found float64 (2,)"),
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
        state = RowsState("m", GATHERED(outputs_as_they_are, number), side.functions.to_numpy)
        state.add(side.tensor(np.ones((4, numbers), np.float32)), {}, rows(np.arange(4), 4))
        of_workers.append(state.parts())
    with pytest.raises(TaskError, match=r"metrics\['m'\]: update returned .*\(2,\).* and .*\(3,\)"):
        state.value(of_workers)
