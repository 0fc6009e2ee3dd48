"""Named losses and metrics with ignored targets and weights, in both frameworks, against PyTorch's own."""

from types import SimpleNamespace

import numpy as np
import pytest

torch, tf = pytest.importorskip("torch"), pytest.importorskip("tensorflow")

from hvdtrain.backends.objective.losses import Weighted  # noqa: E402
from hvdtrain.backends.objective.objective import make_objective  # noqa: E402
from hvdtrain.backends.tensorflow.objective import losses as keras_losses  # noqa: E402
from hvdtrain.backends.torch.objective import losses as torch_losses  # noqa: E402
from hvdtrain.errors import TaskError  # noqa: E402

CLASSES = 6
RANDOM = np.random.RandomState(8)
SHAPES = {"samples": (9,), "sequences": (9, 3), "images": (9, 2, 4)}


SIDES = {"torch": (torch.from_numpy, torch_losses.NAMED), "tf": (tf.constant, keras_losses.NAMED)}


def arrays(shape, ignored):
    logits = (2 * RANDOM.randn(*shape, CLASSES)).astype(np.float32)
    targets = RANDOM.randint(0, CLASSES, shape)
    targets[RANDOM.rand(*shape) < 0.3] = ignored
    targets[2] = ignored  # the whole of a sample
    return logits, targets


def mean(result):
    """Give the mean over what counts of a result, and check its shape."""
    assert isinstance(result, Weighted)
    values, weights = (np.asarray(part, np.float64) for part in result)
    assert values.shape == weights.shape == (9,)
    assert np.isfinite(values).all()
    return (values * weights).sum() / weights.sum()


def evaluated(framework, task, batch, smoothing=0.0):
    tensor, table = SIDES[framework]
    objective = make_objective(task, framework, table, smoothing)
    return objective(lambda x: x, {name: tensor(value) for name, value in batch.items()})


@pytest.mark.parametrize(("ignored", "smoothing"), [(-100, 0.0), (255, 0.2), (0, 0.2)])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("framework", SIDES)
def test_ignored_targets_are_left_out_as_in_pytorch(framework, shape, ignored, smoothing):
    logits, targets = arrays(shape, ignored)
    metrics = {name: name for name in ("accuracy", "top5_accuracy", "cross_entropy")}
    task = SimpleNamespace(loss="cross_entropy", metrics=metrics, ignore_index=ignored)
    batch = {"inputs": logits, "targets": targets}
    loss, found = evaluated(framework, task, batch, smoothing)
    flat, labels = torch.from_numpy(logits).reshape(-1, CLASSES), torch.from_numpy(targets).reshape(-1)
    options = {"ignore_index": ignored, "label_smoothing": smoothing}
    expected = torch.nn.functional.cross_entropy(flat, labels, **options).item()
    assert mean(loss) == pytest.approx(expected, 1e-5)
    order = np.argsort(-logits, -1)[targets != ignored]
    right = order == targets[targets != ignored][:, None]
    assert mean(found["accuracy"]) == pytest.approx(right[:, 0].mean())
    assert mean(found["top5_accuracy"]) == pytest.approx(right[:, :5].any(1).mean())
    plain = torch.nn.functional.cross_entropy(flat, labels, ignore_index=ignored).item()
    assert mean(found["cross_entropy"]) == pytest.approx(plain, 1e-5)


@pytest.mark.parametrize("per_target", [False, True])
@pytest.mark.parametrize("loss", ["mse", "cross_entropy"])
@pytest.mark.parametrize("framework", SIDES)
def test_a_batchs_weights_weigh_losses_and_no_metrics(framework, loss, per_target):
    logits = RANDOM.randn(9, 3, *([CLASSES] if loss == "cross_entropy" else [])).astype(np.float32)
    targets = RANDOM.randint(0, 2, (9, 3))
    targets = targets if loss == "cross_entropy" else targets.astype(np.float32)
    weights = RANDOM.rand(9, *([3] if per_target else [])).astype(np.float32)
    task = SimpleNamespace(loss=loss, metrics={"same": loss})
    batch = {"inputs": logits, "targets": targets}
    alone, _ = evaluated(framework, SimpleNamespace(loss=loss, metrics={}), {
        "inputs": logits.reshape(27, *logits.shape[2:]), "targets": targets.reshape(27)
    })  # fmt: skip
    each = np.asarray(alone.values if isinstance(alone, Weighted) else alone).reshape(9, 3)
    found, metrics = evaluated(framework, task, {**batch, "weights": weights})
    share = np.broadcast_to(weights if per_target else weights[:, None], (9, 3))
    assert mean(found) == pytest.approx((each * share).sum() / share.sum(), rel=1e-5)
    same = metrics["same"]
    values = same.values if isinstance(same, Weighted) else same
    np.testing.assert_allclose(np.asarray(values), each.mean(1), rtol=1e-5)


@pytest.mark.parametrize("framework", SIDES)
def test_ignored_labels_of_binary_targets_are_left_out(framework):
    logits = RANDOM.randn(9, 3).astype(np.float32)
    targets = RANDOM.randint(0, 2, (9, 3)).astype(np.float32)
    known = RANDOM.rand(9, 3) < 0.6
    task = SimpleNamespace(loss="binary_cross_entropy", metrics={"right": "binary_accuracy"}, ignore_index=-1)
    batch = {"inputs": logits, "targets": np.where(known, targets, -1).astype(np.float32)}
    loss, metrics = evaluated(framework, task, batch)
    each = np.log1p(np.exp(-np.where(targets > 0, logits, -logits)))
    assert mean(loss) == pytest.approx(each[known].mean(), rel=1e-5)
    assert mean(metrics["right"]) == pytest.approx(((logits > 0) == (targets > 0))[known].mean())


@pytest.mark.parametrize("framework", SIDES)
def test_one_target_per_sample_costs_nothing_unless_the_task_says_that_some_are_ignored(framework):
    logits, targets = RANDOM.randn(9, CLASSES).astype(np.float32), RANDOM.randint(0, CLASSES, 9)
    task = SimpleNamespace(loss="cross_entropy", metrics={"accuracy": "accuracy"})
    loss, metrics = evaluated(framework, task, {"inputs": logits, "targets": targets})
    assert not isinstance(loss, Weighted)
    assert not isinstance(metrics["accuracy"], Weighted)
    with pytest.raises(Exception, match="-100"):  # it does not count as a loss of 0
        evaluated(framework, task, {"inputs": logits, "targets": np.where(targets == 1, -100, targets)})


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
    task = SimpleNamespace(**{"loss": "cross_entropy", **attributes})
    table = {"cross_entropy": print, "mse": print}
    with pytest.raises(TaskError, match=said):
        make_objective(task, "torch", table)
