"""Feeding: batches are those that would be fetched on the spot; of samples that cannot be read, others."""

import numpy as np
import pytest
from support.fakes import dataset

from hvdtrain.data.datasets import ArrayDataset, ItemDataset, fetch
from hvdtrain.data.feed import Feed, HostBatch, Reader, Shard, read_ahead
from hvdtrain.data.order import BatchPlan, ShuffledOrder, sample_keys
from hvdtrain.data.readers import LocalFetch
from hvdtrain.errors import BadSampleError, DataError

SIZE, BAD = 20, {0, 7, 8, 19}


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


class Damaged:
    def __init__(self, bad=BAD, size: int = SIZE) -> None:
        self.bad, self.size = bad, size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict:
        if index in self.bad:
            raise BadSampleError(f"photos/{index}.png is cut off")
        return {"inputs": np.full(2, index, np.float32), "targets": index}


class InBatches(Damaged):
    """The same, read many at once, with a seed for each."""

    def batch(self, indices):
        samples = [self[int(index)] for index in indices]
        return {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}

    def augmented(self, indices, keys):
        return self.batch(indices) | {"keys": keys.astype(np.int64)}


@pytest.mark.parametrize("data", [Damaged(), InBatches()], ids=["one by one", "in batches"])
def test_the_next_readable_one_stands_in(data):
    arrays, bad = LocalFetch(data, skip=True)(np.asarray([6, 7, 8, 19, 9]))
    assert arrays["targets"].tolist() == [6, 9, 9, 1, 9]
    assert arrays["inputs"].shape == (5, 2)
    assert [(b.place, b.index, b.replacement_index) for b in bad] == [(1, 7, 9), (2, 8, 9), (3, 19, 1)]
    assert bad[0].problem == "photos/7.png is cut off"


@pytest.mark.parametrize("size", [5, 300])
def test_too_many_in_a_row_are_an_error_of_the_data_set(size):
    with pytest.raises(DataError, match=r"samples in a row cannot be read, from sample 3: photos/3\.png"):
        LocalFetch(Damaged(range(size), size), skip=True)(np.asarray([3]))


def test_samples_of_batches_that_were_taken_ahead_do_not_count_yet():
    """Index 0 is in the batch of step 0, 7 and 8 in those of steps 1 and 2, 19 in that of step 4."""
    data = Damaged()
    reader = Reader(data, None, Shard(BatchPlan(4, 1), 0, 0, 0, SIZE), LocalFetch(data, skip=True))
    with Feed(read_ahead(reader.__getitem__, len(reader), 1)) as feed:
        taken, counts = iter(feed), []
        next(taken)
        for batch in taken:  # the loop is one step behind
            counts.append(feed.take_notes(batch.step - 1)[0])
        counts.append(feed.take_notes(4)[0])
    assert counts == [1, 1, 1, 0, 1]
