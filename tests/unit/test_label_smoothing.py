"""Label smoothing: the formula in both frameworks, and where it does not act."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.backends.objective.objective import make_objective
from hvdtrain.errors import ConfigError

SMOOTHING, CLASSES = 0.1, 5
RANDOM = np.random.RandomState(4)
SHAPES = {"samples": (6,), "sequences": (6, 3), "images": (6, 2, 4)}


def reference(logits, targets, smoothing):
    """Give the cross-entropy with the smoothed targets, in 64 bits."""
    logits = logits.astype(np.float64)
    logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    wanted = (1 - smoothing) * np.eye(CLASSES)[targets] + smoothing / CLASSES
    return -(wanted * logs).sum(-1).reshape(len(targets), -1).mean(1)


def torch_losses():
    torch = pytest.importorskip("torch")
    from hvdtrain.backends.torch.objective.losses import NAMED

    return torch.from_numpy, NAMED


def keras_losses():
    tf = pytest.importorskip("tensorflow")
    from hvdtrain.backends.tensorflow.objective.losses import NAMED

    return tf.constant, NAMED


SIDES = {"torch": torch_losses, "tf": keras_losses}


def values_of(result):
    return (result.values if isinstance(result, Weighted) else result).numpy()


@pytest.mark.parametrize("smoothing", [0.0, SMOOTHING])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
@pytest.mark.parametrize("framework", SIDES)
def test_the_loss_is_that_of_the_smoothed_targets(framework, shape, smoothing):
    tensor, table = SIDES[framework]()
    logits = (3 * RANDOM.randn(*shape, CLASSES)).astype(np.float32)
    targets = RANDOM.randint(0, CLASSES, shape)
    task = SimpleNamespace(loss="cross_entropy", metrics={"plain": "cross_entropy"})
    objective = make_objective(task, framework, table, smoothing)
    losses, metrics = objective(lambda x: x, {"inputs": tensor(logits), "targets": tensor(targets)})
    np.testing.assert_allclose(values_of(losses), reference(logits, targets, smoothing), rtol=1e-5)
    np.testing.assert_allclose(values_of(metrics["plain"]), reference(logits, targets, 0), rtol=1e-5)


def own(*_):
    return None, {}


@pytest.mark.parametrize(
    ("task", "found"),
    [
        (SimpleNamespace(loss="mse"), "mse"),
        (SimpleNamespace(loss=own), "a function of its own"),
    ],
)
def test_another_loss_is_refused(task, found):
    with pytest.raises(ConfigError) as caught:
        make_objective(task, "tf", {"cross_entropy": own, "mse": own}, SMOOTHING)
    expected = f"label_smoothing acts on the named loss cross_entropy; the task's loss is {found}"
    assert caught.value.problem == expected
    assert caught.value.everywhere
