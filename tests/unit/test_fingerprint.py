"""Fingerprints: what they read, what they tell apart and what they do not."""

import numpy as np
import pytest

from hvdtrain.data.datasets import as_dataset
from hvdtrain.data.fingerprint import digest, first_difference, is_same, probe_indices, take_fingerprint
from hvdtrain.errors import BadSampleError


def arrays(size=100, seed=0):
    generator = np.random.default_rng(seed)
    return {"inputs": generator.normal(size=(size, 5)), "targets": generator.integers(0, 9, size)}


class Noting:
    """Samples that note which of them were read."""

    def __init__(self, size, make=lambda index: index):
        self.size, self.make, self.read = size, make, []

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        self.read.append(index)
        return {"inputs": self.make(index)}


def test_a_slow_data_set_is_represented_by_fewer_samples():
    dataset = Noting(1000)
    found = take_fingerprint(as_dataset(dataset), seconds=0)
    assert dataset.read == [0]
    assert first_difference(found, take_fingerprint(as_dataset(Noting(1000)))) is None
    other = take_fingerprint(as_dataset(Noting(1000, lambda index: index + 1)))
    assert first_difference(found, other) == (0, "inputs")


def test_equal_data_have_equal_fingerprints_whatever_they_are_in():
    held = arrays()
    as_pairs = [(x, int(y)) for x, y in zip(held["inputs"], held["targets"], strict=True)]
    assert take_fingerprint(as_dataset(held)) == take_fingerprint(as_dataset(as_pairs))


@pytest.mark.parametrize(("key", "place"), [("inputs", 0), ("targets", 13), ("targets", 31)])
def test_one_other_value_is_found(key, place):
    held, index = arrays(), probe_indices(100)[place]
    before = take_fingerprint(as_dataset(held))
    held[key][index] = held[key][index] + 1
    assert first_difference(before, take_fingerprint(as_dataset(held))) == (index, key)


@pytest.mark.parametrize("kind", ["float32", "complex64", "uint8", ">i4"])
def test_permuted_values_are_another_sample(kind):
    values = np.random.default_rng(0).integers(0, 2, 40).astype(kind)
    other = np.concatenate([values[1:], values[:1]])
    assert is_same(digest(values), digest(values.copy()))
    assert not is_same(digest(values), digest(other))
    assert not is_same(digest(values), digest(values.reshape(2, 20)))


def test_rounding_is_no_difference():
    values = np.random.default_rng(0).normal(size=3000).astype(np.float32)
    assert is_same(digest(values), digest(np.nextafter(values, np.float32(9))))
    assert is_same(digest(values * 0), digest(values * 0))


@pytest.mark.parametrize("error", [BadSampleError("no JPEG"), ValueError("a bug")])
@pytest.mark.parametrize("skip", [False, True])
def test_samples_that_cannot_be_read_are_left_out(error, skip):
    def make(index):
        if index == 0:
            raise error
        return index

    found = take_fingerprint(as_dataset(Noting(50, make)), skip)
    replaced = skip and isinstance(error, BadSampleError)
    assert (found.samples["inputs"][0] is None) == (not replaced)
    assert None not in found.samples["inputs"][1:]
    assert first_difference(found, take_fingerprint(as_dataset(Noting(50, make)), skip)) is None
