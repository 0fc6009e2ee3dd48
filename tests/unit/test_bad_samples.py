"""Samples that cannot be read: an error, or the next readable one in their place, counted."""

import numpy as np
import pytest

from hvdtrain.data.feed import Feed, Reader, Shard, read_ahead
from hvdtrain.data.order import BatchPlan
from hvdtrain.data.readers import LocalFetch
from hvdtrain.errors import BadSampleError, DataError

SIZE, BAD = 20, {0, 7, 8, 19}


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
    assert bad[0].describe() == "sample 7: photos/7.png is cut off"


@pytest.mark.parametrize("size", [5, 300])
def test_too_many_in_a_row_are_an_error_of_the_data_set(size):
    with pytest.raises(DataError, match=r"samples in a row cannot be read, from sample 3: photos/3\.png"):
        LocalFetch(Damaged(range(size), size), skip=True)(np.asarray([3]))


def test_samples_of_batches_that_were_taken_ahead_do_not_count_yet():
    """Index 0 is in the batch of step 0, 7 and 8 in those of steps 1 and 2, 19 in that of step 4."""
    data = Damaged()
    shard = Shard(BatchPlan(4, 1), 0, 0, 0, SIZE)
    reader = Reader(data, None, shard, LocalFetch(data, skip=True))
    with Feed(read_ahead(reader.__getitem__, len(reader), 1)) as feed:
        batches = iter(feed)
        counts = []
        next(batches)
        for batch in batches:  # the loop is one step behind
            counts.append(feed.take_notes(batch.step - 1)[0])
        counts.append(feed.take_notes(4)[0])
    assert counts == [1, 1, 1, 0, 1]
