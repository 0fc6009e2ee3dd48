"""Mixup and CutMix: what is drawn, what a batch holds, and the loss of both samples."""

import numpy as np
import pytest

import hvdtrain
from hvdtrain.backends.objective.objective import mixed
from hvdtrain.data.augment import SHARE, Mixed, beta, partner_of
from hvdtrain.data.datasets import as_dataset
from hvdtrain.data.order import sample_keys
from hvdtrain.errors import DataError

torch, tf = pytest.importorskip("torch"), pytest.importorskip("tensorflow")
FUNCTIONS = {"torch": (torch.Tensor.to, torch.as_tensor), "tf": (tf.cast, tf.constant)}

SIZE = 400
X = np.random.RandomState(0).randn(SIZE, 5).astype(np.float32)
Y = np.arange(SIZE)
IMAGES = np.random.RandomState(1).randint(0, 255, (SIZE, 8, 6, 3)).astype(np.uint8)


def batch_of(indices, mixup=0.0, cutmix=0.0, inputs=X, epoch=0):
    indices = np.asarray(indices)
    data = Mixed(as_dataset((inputs, Y)), mixup, cutmix)
    return data.augmented(indices, sample_keys(indices, 3, epoch))


def test_inputs_are_mixed_with_any_sample_of_the_data_set():
    batch = batch_of(range(100), mixup=0.5)
    partners, shares = batch["mixed_targets"], batch[SHARE]
    expected = X[:100] * (1 - shares[:, None]) + X[partners] * shares[:, None]
    np.testing.assert_allclose(batch["inputs"], expected, atol=1e-6)
    np.testing.assert_array_equal(batch["targets"], Y[:100])
    assert (partners >= 100).mean() > 0.6


def test_draws_depend_on_the_sample_and_the_epoch_alone():
    whole, part = batch_of(range(100), mixup=0.5), batch_of([7, 5], mixup=0.5)
    for name in whole:
        np.testing.assert_array_equal(whole[name][[7, 5]], part[name])
    assert (batch_of(range(100), mixup=0.5, epoch=1)["mixed_targets"] != whole["mixed_targets"]).mean() > 0.9


@pytest.mark.parametrize("alpha", [0.1, 4.0])
def test_shares_have_the_distribution_of_beta(alpha):
    found = beta((np.arange(20_000) + 0.5) / 20_000, alpha)
    assert found.mean() == pytest.approx(0.5, abs=1e-3)
    assert found.var() == pytest.approx(1 / (4 * (2 * alpha + 1)), rel=2e-3)


def test_a_box_is_pasted_and_its_area_is_the_share():
    batch = batch_of(range(100), cutmix=1.0, inputs=IMAGES)
    is_pasted = (batch["inputs"] != IMAGES[:100]).any(3)
    other = IMAGES[batch["mixed_targets"]]
    np.testing.assert_array_equal(batch["inputs"][is_pasted], other[is_pasted])
    assert batch["inputs"].dtype == np.uint8
    np.testing.assert_allclose(is_pasted.mean((1, 2)), batch[SHARE], atol=0.05)  # pixels may be equal
    first = np.moveaxis(IMAGES, 3, 1)
    np.testing.assert_array_equal(
        np.moveaxis(batch_of(range(100), cutmix=1.0, inputs=first)["inputs"], 1, 3), batch["inputs"]
    )


def test_what_cannot_be_mixed_is_refused():
    with pytest.raises(DataError, match="mix numbers; 'inputs' holds int64"):
        batch_of([0, 1], inputs=Y, mixup=0.2)
    with pytest.raises(DataError, match="images with up to 4 channels"):
        batch_of([0, 1], inputs=X, cutmix=1.0)


@pytest.mark.parametrize("framework", ["torch", "tf"])
def test_the_loss_is_that_of_both_by_their_shares_and_weights(framework):
    cast, tensor = FUNCTIONS[framework]
    batch = {
        "targets": tensor([1.0, 2.0]),
        "weights": tensor([1.0, 0.0]),
        "mixed_targets": tensor([5.0, 6.0]),
        "mixed_weights": tensor([3.0, 0.0]),
        SHARE: tensor([0.25, 0.5]),
    }
    plain = mixed(lambda outputs, batch: outputs * batch["targets"], cast)
    np.testing.assert_allclose(plain(2.0, batch), [2 * (0.75 + 1.25), 2 * 4.0])
    weighted = mixed(lambda outputs, b: hvdtrain.Weighted(b["targets"] * 1, b["weights"]), cast)
    values, weights = weighted(2.0, batch)
    np.testing.assert_allclose(weights, [1.5, 0.0])
    np.testing.assert_allclose(values, [(0.75 * 1 + 0.75 * 5) / 1.5, 0.0])
    assert partner_of(batch)["weights"] is batch["mixed_weights"]
