"""Feeding: the batches read ahead are those that would be fetched on the spot."""

import numpy as np
import pytest
from support.fakes import dataset

from hvdtrain.data.datasets import ArrayDataset, ItemDataset, fetch
from hvdtrain.data.feed import Feed, HostBatch, Reader, Shard, read_ahead
from hvdtrain.data.order import BatchPlan, ShuffledOrder, sample_keys


def one_by_one(size: int) -> ItemDataset:
    return ItemDataset([{"inputs": np.full(1, i, np.float32), "targets": i} for i in range(size)], {})


def batches(data, order, share: Shard, threads: int = 2) -> list[HostBatch]:
    reader = Reader(data, order, share)
    with Feed(read_ahead(reader.__getitem__, len(reader), threads)) as feed:
        return list(feed)


@pytest.mark.parametrize("make", [dataset, one_by_one])
@pytest.mark.parametrize(
    ("plan", "rank"),
    [(BatchPlan(4, 1), 0), (BatchPlan(6, 2), 1), (BatchPlan(5, 2), 1), (BatchPlan(12, 2, accumulate=3), 0)],
    ids=str,
)
def test_batches_equal_what_is_fetched_directly(make, plan, rank):
    data, order = make(23), ShuffledOrder(23, seed=1)
    share = Shard(plan, rank, first_step=0, first_sample=0, last_sample=2 * 23)
    found = batches(data, order, share)
    assert [batch.step for batch in found] == list(range(share.steps))
    for batch in found:
        positions, weights, count = share.positions(batch.step)
        indices = order.indices(positions)
        np.testing.assert_array_equal(batch.indices, indices)
        np.testing.assert_array_equal(batch.weights, weights)
        assert batch.total_weight == count
        direct = fetch(data, indices.reshape(-1))
        for name, array in batch.arrays.items():
            np.testing.assert_array_equal(array.reshape(direct[name].shape), direct[name])


class Augmented(ArrayDataset):
    def augmented(self, indices, keys):
        return {**self.batch(indices), "keys": keys}


def test_training_reads_augmented_samples_and_evaluation_reads_them_as_they_are():
    data = Augmented({"inputs": np.arange(6)})
    share = Shard(BatchPlan(3, 1), 0, 0, 0, 6)
    order = ShuffledOrder(6, seed=1)
    for batch in Reader(data, order, share)[0]:
        assert batch.arrays["keys"].tolist() == sample_keys(batch.indices, 1, 0).tolist()
        assert batch.arrays["inputs"].tolist() == batch.indices.tolist()
    assert "keys" not in Reader(data, None, share)[0][0].arrays
