"""Named losses in both frameworks: classes, soft and ignored targets, weights, loss objects; refusals."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdtrain.backends.objective.losses import Weighted
from hvdtrain.backends.objective.objective import make_objective
from hvdtrain.backends.tensorflow.objective import losses as of_keras
from hvdtrain.backends.torch.objective import losses as of_torch
from hvdtrain.errors import TaskError

RANDOM = np.random.RandomState(5)
SIDES = {
    "torch": (lambda array: torch.from_numpy(np.array(array)), of_torch.NAMED, torch.nn),
    "tf": (tf.constant, of_keras.NAMED, keras.losses),
}


@pytest.fixture(params=SIDES)
def side(request):
    tensor, table, library = SIDES[request.param]
    return SimpleNamespace(name=request.param, tensor=tensor, table=table, library=library)


def computed(side, outputs, targets, smoothing=0.0, weights=None, **task):
    """Return the loss and the metrics of a task whose model gives these outputs."""
    task = {"loss": "cross_entropy", **task}
    objective = make_objective(SimpleNamespace(**task), side.name, side.table, smoothing)
    batch = {"inputs": side.tensor(np.float32(outputs)), "targets": side.tensor(targets)}
    return objective(lambda x: x, batch if weights is None else {**batch, "weights": side.tensor(weights)})


def values(side, outputs, targets, **task):
    """Return the values of losses and metrics; of weighted ones, all weights must be equal."""

    def per_sample(given):
        if isinstance(given, Weighted):
            weights = np.asarray(given.weights)
            np.testing.assert_array_equal(weights, weights.flat[0])
            given = given.values
        return np.asarray(given)

    losses, metrics = computed(side, outputs, targets, **task)
    return per_sample(losses), {name: per_sample(value) for name, value in metrics.items()}


def entropy(logits, targets):
    """Give the cross-entropy with classes last, in 64 bits; targets are probabilities."""
    logits = np.float64(logits)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    return -(targets * logs).sum(-1).reshape(len(logits), -1).mean(1)


ALL = {"metrics": {name: name for name in ("accuracy", "top5_accuracy")}}


@pytest.mark.parametrize("shape", [(4, 5), (4, 2, 3), (4, 7)], ids=str)
def test_classes_may_stand_on_axis_one(side, shape):
    classes = 6
    logits = RANDOM.randn(*shape, classes)
    targets = RANDOM.randint(0, classes, shape)
    losses, metrics = values(side, logits, targets, **ALL)
    np.testing.assert_allclose(losses, entropy(logits, np.eye(classes)[targets]), rtol=1e-5)
    moved, moved_metrics = values(side, np.moveaxis(logits, -1, 1), targets, **ALL)
    np.testing.assert_allclose(moved, losses, rtol=1e-5)
    for name, of_last in metrics.items():
        np.testing.assert_allclose(moved_metrics[name], of_last)


def test_layouts_that_shapes_do_not_tell_apart_need_class_axis(side):
    logits, targets = RANDOM.randn(4, 3, 3), RANDOM.randint(0, 3, (4, 3))
    with pytest.raises(TaskError, match=r"cannot tell which axis .*\(4, 3, 3\).*\(4, 3\)\nSet class_axis"):
        values(side, logits, targets)
    onehot = np.eye(3)[targets]
    for axis, expected in ((-1, entropy(logits, onehot)), (1, entropy(np.moveaxis(logits, 1, -1), onehot))):
        np.testing.assert_allclose(values(side, logits, targets, class_axis=axis)[0], expected, rtol=1e-5)


@pytest.mark.parametrize(("shape", "options"), [((4, 3), {}), ((4, 5, 3), {"class_axis": -1})], ids=str)
def test_targets_can_be_probabilities(side, shape, options):
    logits, targets = RANDOM.randn(*shape), RANDOM.dirichlet(np.ones(shape[-1]), shape[:-1])
    losses, metrics = values(side, logits, np.float32(targets), **options, **ALL)
    np.testing.assert_allclose(losses, entropy(logits, targets), rtol=1e-5)
    right = logits.argmax(-1) == targets.argmax(-1)
    np.testing.assert_allclose(metrics["accuracy"], right.reshape(4, -1).mean(1), rtol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "targets", "options", "said"),
    [
        ((4, 3), np.ones((4, 3), int), {}, r"found whole numbers of the logits' shape \(4, 3\)\nOf one-hot"),
        ((4, 5, 3), np.zeros((4, 5), int), {"class_axis": 1}, r"and targets \(4, 5\) with class_axis 1"),
        ((4, 5, 3), np.zeros((4, 5), int), {"class_axis": 2}, r"the task's class_axis is 2; it must be -1"),
        ((4, 1), np.zeros(4, int), {}, r"outputs \(4, 1\) have one\n.*, or use binary_cross_entropy"),
    ],
)
def test_shapes_that_do_not_fit_are_named(side, outputs, targets, options, said):
    with pytest.raises(TaskError, match=said):
        values(side, np.zeros(outputs), targets, **options)


def test_probabilities_are_no_class_numbers_where_keras_does_not_know_all_of_the_shape_of_the_outputs():
    @tf.function(input_signature=[tf.TensorSpec([None, 4]), tf.TensorSpec([8, 4])], autograph=False)
    def losses(outputs, targets):
        return of_keras.NAMED["cross_entropy"](outputs, {"targets": targets})

    with pytest.raises(TaskError, match="outputs whose shape is known"):
        losses(tf.zeros((8, 4)), tf.fill((8, 4), 0.25))


def test_the_logits_of_a_structured_output_are_taken_and_an_own_loss_returns_a_pair(side):
    batch = {"inputs": 0, "labels": side.tensor(np.arange(2))}
    logits = side.tensor(np.float32([[1, 2], [3, 4]]))
    objective = make_objective(SimpleNamespace(loss="cross_entropy"), side.name, side.table)
    plain, *others = (
        np.asarray(objective(lambda x, given=given: given, batch)[0])
        for given in (logits, SimpleNamespace(logits=logits, loss=None), {"logits": logits})
    )
    for found in others:
        np.testing.assert_array_equal(found, plain)
    for result in (np.ones(2), (1, 2)):
        own = SimpleNamespace(**{f"{side.name}_loss": lambda model, batch, given=result: given})
        with pytest.raises(TaskError, match=rf"{side.name}_loss must return \(loss per sample"):
            make_objective(own, side.name, side.table)(None, {"x": np.ones(2)})


TAKEN = {
    "torch": {
        "CrossEntropyLoss": ({"label_smoothing": 0.1}, "cross_entropy"),
        "BCEWithLogitsLoss": ({}, "binary_cross_entropy"),
        "MSELoss": ({}, "mse"),
        "L1Loss": ({"reduction": "none"}, "mae"),
    },
    "tf": {
        "SparseCategoricalCrossentropy": ({"from_logits": True}, "cross_entropy"),
        "BinaryCrossentropy": ({"from_logits": True}, "binary_cross_entropy"),
        "MeanSquaredError": ({}, "mse"),
        "MeanAbsoluteError": ({}, "mae"),
    },
}


def test_a_loss_object_gives_the_mean_that_it_computes_itself(side):
    for name, (options, named) in TAKEN[side.name].items():
        loss = getattr(side.library, name)(**options)
        outputs = np.float32(RANDOM.randn(4, 3))
        targets = RANDOM.randint(0, 3, 4) if named == "cross_entropy" else np.float32(RANDOM.rand(4, 3))
        losses, _ = values(side, outputs, targets, loss=loss)
        pair = (side.tensor(outputs), side.tensor(targets))
        alone = loss(*pair) if side.name == "torch" else loss(*reversed(pair))
        np.testing.assert_allclose(losses.mean(), np.asarray(alone).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    ("framework", "field", "loss", "said"),
    [
        ("torch", "loss", torch.nn.CrossEntropyLoss(reduction="sum"), "'cross_entropy'"),
        ("torch", "loss", torch.nn.CrossEntropyLoss(weight=torch.ones(3)), "class_weights"),
        ("torch", "loss", torch.nn.functional.mse_loss, "mse_loss of PyTorch(.|\n)*def loss"),
        ("torch", "torch_loss", torch.nn.MSELoss(), "torch_loss is MSELoss of PyTorch"),
        ("torch", "loss", keras.losses.MeanSquaredError(), "and --framework is torch"),
        ("tf", "loss", keras.losses.SparseCategoricalCrossentropy(), "only with from_logits=True"),
        ("tf", "loss", keras.losses.BinaryCrossentropy(True, label_smoothing=0.1), "label_smoothing=0.1"),
        ("tf", "loss", keras.losses.Huber(), "Known by name: binary_cross_entropy"),
        ("tf", "loss", type("Own", (keras.losses.Loss,), {"call": print})(reduction="sum"), "='sum'"),
    ],
)  # fmt: skip
def test_other_losses_of_a_library_are_refused(framework, field, loss, said):
    table = SIDES[framework][1]
    with pytest.raises(TaskError, match=said):
        make_objective(SimpleNamespace(**{field: loss}), framework, table)


def mean(result):
    """Give the mean over what counts of a result of nine samples, and check its shape."""
    assert isinstance(result, Weighted)
    values, weights = (np.asarray(part, np.float64) for part in result)
    assert values.shape == weights.shape == (9,)
    assert np.isfinite(values).all()
    return (values * weights).sum() / weights.sum()


@pytest.mark.parametrize(("ignored", "smoothing"), [(-100, 0.0), (255, 0.2), (0, 0.2)])
@pytest.mark.parametrize("shape", [(9,), (9, 3), (9, 2, 4)], ids=str)
def test_ignored_targets_are_left_out_as_in_pytorch(side, shape, ignored, smoothing):
    classes = 6
    logits, targets = np.float32(2 * RANDOM.randn(*shape, classes)), RANDOM.randint(0, classes, shape)
    targets[RANDOM.rand(*shape) < 0.3] = ignored
    targets[2] = ignored  # the whole of a sample
    metrics = {name: name for name in ("accuracy", "top5_accuracy", "cross_entropy")}
    loss, found = computed(side, logits, targets, smoothing, metrics=metrics, ignore_index=ignored)
    flat, labels = torch.from_numpy(logits).reshape(-1, classes), torch.from_numpy(targets).reshape(-1)
    for result, of_torch_too in ((loss, smoothing), (found["cross_entropy"], 0.0)):
        options = {"ignore_index": ignored, "label_smoothing": of_torch_too}
        expected = torch.nn.functional.cross_entropy(flat, labels, **options).item()
        assert mean(result) == pytest.approx(expected, 1e-5)
    order = np.argsort(-logits, -1)[targets != ignored]
    right = order == targets[targets != ignored][:, None]
    assert mean(found["accuracy"]) == pytest.approx(right[:, 0].mean())
    assert mean(found["top5_accuracy"]) == pytest.approx(right[:, :5].any(1).mean())


@pytest.mark.parametrize("per_target", [False, True])
def test_a_batchs_weights_weigh_losses_and_no_metrics(side, per_target):
    outputs, targets = np.float32(RANDOM.randn(2, 9, 3))
    weights = np.float32(RANDOM.rand(9, *([3] if per_target else [])))
    found, metrics = computed(side, outputs, targets, weights=weights, loss="mse", metrics={"same": "mse"})
    each, share = (outputs - targets) ** 2, weights if per_target else weights[:, None] * np.ones(3)
    assert mean(found) == pytest.approx((each * share).sum() / share.sum(), rel=1e-5)
    np.testing.assert_allclose(np.asarray(metrics["same"]), each.mean(1), rtol=1e-5)


def test_ignored_labels_of_binary_targets_are_left_out(side):
    logits, targets = np.float32(RANDOM.randn(9, 3)), np.float32(RANDOM.randint(0, 2, (9, 3)))
    known = RANDOM.rand(9, 3) < 0.6
    task = {"loss": "binary_cross_entropy", "metrics": {"right": "binary_accuracy"}, "ignore_index": -1}
    loss, metrics = computed(side, logits, np.where(known, targets, np.float32(-1)), **task)
    each = np.log1p(np.exp(-np.where(targets > 0, logits, -logits)))
    assert mean(loss) == pytest.approx(each[known].mean(), rel=1e-5)
    assert mean(metrics["right"]) == pytest.approx(((logits > 0) == (targets > 0))[known].mean())


def test_one_target_per_sample_costs_nothing_unless_the_task_says_that_some_are_ignored(side):
    logits, targets = RANDOM.randn(9, 6), RANDOM.randint(0, 6, 9)
    loss, metrics = computed(side, logits, targets, metrics={"accuracy": "accuracy"})
    assert not isinstance(loss, Weighted)
    assert not isinstance(metrics["accuracy"], Weighted)
    with pytest.raises(Exception, match="-100"):  # it does not count as a loss of 0
        computed(side, logits, np.where(targets == 1, -100, targets))


@pytest.mark.parametrize(
    ("attributes", "said"),
    [
        ({"ignore_index": 1.5}, r"ignore_index must be a class number that does not count, found 1\.5"),
        ({"class_weights": [1.0, -1.0]}, r"class_weights must be numbers of at least 0.*\[1\.0, -1\.0\]"),
        ({"class_weights": {0: 1.0}}, "class_weights must be numbers"),
        ({"class_weights": [1.0], "loss": "mse"}, "acts on the named loss cross_entropy"),
        ({"class_weights": [1.0], "torch_loss": print}, "the task's loss is its own torch_loss"),
    ],
)
def test_what_a_task_cannot_say_is_refused(attributes, said):
    with pytest.raises(TaskError, match=said):
        make_objective(SimpleNamespace(**{"loss": "cross_entropy", **attributes}), "torch", of_torch.NAMED)
