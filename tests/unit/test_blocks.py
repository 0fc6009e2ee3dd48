"""The order of samples that are stored in blocks: each once per epoch, from few blocks at a time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import dataset

from hvdtrain.data.order import Blocks, ShuffledOrder, order_identity, ordering_of

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=20).map(tuple)


def order_of(sizes, mixed=2, seed=0):
    return ShuffledOrder(sum(sizes), seed, Blocks(tuple(sizes), mixed))


@given(sizes=SIZES, mixed=st.integers(1, 25), seed=st.integers(0, 2**62), epoch=st.integers(0, 1000))
def test_every_sample_comes_once_per_epoch(sizes, mixed, seed, epoch):
    order, size = order_of(sizes, mixed, seed), sum(sizes)
    found = order.indices(np.arange(epoch * size, (epoch + 1) * size))
    assert sorted(found.tolist()) == list(range(size))


@pytest.mark.parametrize("mixed", [1, 3])
def test_a_window_has_samples_of_few_blocks(mixed):
    order, blocks = order_of([10] * 12, mixed), 12 // mixed
    found = order.indices(np.arange(120)) // 10
    windows = found.reshape(blocks, 10 * mixed)
    assert all(len(set(window.tolist())) == mixed for window in windows)
    assert windows[0].tolist() != sorted(windows[0].tolist()) or mixed == 1


def test_order_is_pinned():
    """A change here makes every earlier run on Parquet unrepeatable."""
    expected = [9, 7, 6, 4, 5, 8, 2, 0, 1, 3, 1, 2, 9, 0, 8, 6, 7, 5, 3, 4]
    assert order_of([3, 1, 4, 2]).indices(np.arange(20)).tolist() == expected


def test_only_data_in_blocks_have_another_order():
    data = dataset(10)
    assert ordering_of(data) is None
    assert order_identity(data) == ""
    data.ordering = Blocks((4, 6), 2)
    assert ordering_of(data) is data.ordering
    assert order_identity(data) != ""
    data.ordering, before = Blocks((4, 6), 1), order_identity(data)
    assert order_identity(data) != before
