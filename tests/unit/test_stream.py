"""Streams: each sample once per pass at any number of workers, uneven shards, resuming, bounded memory."""

import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from support.fakes import on_every_rank

import hvdtrain
from hvdtrain.data.augment import Augmented
from hvdtrain.data.datasets import as_dataset, fetch, signature
from hvdtrain.data.order import BatchPlan
from hvdtrain.data.stream import UNKNOWN_LENGTH, shuffled, source_of
from hvdtrain.data.stream_feed import StreamPart, feed_of
from hvdtrain.errors import DataError

# samples of the shards: uneven, and one is empty
SHARDS = [range(40), range(40, 43), range(43, 43), range(43, 60), range(60, 75), range(75, 83)]
SIZE = 83


def sample(number):
    return {"inputs": np.full(2, number, np.float32), "targets": number}


def from_shards(shards=SHARDS, **options):
    return hvdtrain.stream(lambda shard: map(sample, shard), shards=shards, **options)


def whole(size=SIZE, **options):
    return hvdtrain.stream(lambda: map(sample, range(size)), **options)


def batches_of(make, plan, **options):
    """Return the batches of all workers by step."""

    def read(me):
        with feed_of(StreamPart(make(), plan, me.rank, **options), me.allgather_object) as feed:
            return list(feed)

    found = on_every_rank(["here"] * plan.workers, read)
    for one in found:
        if isinstance(one, Exception):
            raise one
    return list(zip(*found, strict=True))


def steps(make, workers, last=None, global_batch=12, accumulate=1, **options):
    """Return what all workers trained on, by step: for each the targets by rank, and check them."""
    plan, result = BatchPlan(global_batch, workers, accumulate), []
    for batches in batches_of(make, plan, last_sample=last, **options):
        assert len({batch.step for batch in batches}) == 1
        real = [batch.arrays["targets"][batch.weights > 0].tolist() for batch in batches]
        assert {batch.total_weight for batch in batches} == {float(sum(map(len, real)))}
        assert all(batch.weights.shape == (accumulate, plan.micro_batch) for batch in batches)
        result.append(real)
    return result


def joined(found):
    return [number for step in found for part in step for number in part]


MAKES = {
    "whole": whole,
    "shards": from_shards,
    "buffer": lambda: whole(shuffle_buffer=20),
    "shards and buffer": lambda: from_shards(shuffle_buffer=7),
    "declared": lambda: from_shards(length=SIZE),
}


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_sample_comes_once_per_pass_and_a_resumed_run_goes_on_as_if_it_had_not_stopped(make, workers):
    unbroken = steps(make, workers, last=3 * SIZE)
    found = joined(unbroken)
    assert len(found) == 3 * SIZE
    for number in range(3):
        assert sorted(found[number * SIZE : (number + 1) * SIZE]) == list(range(SIZE))
    consumed = list(itertools.accumulate(len(joined([step])) for step in unbroken))
    for number in (0, 3, len(unbroken) // 2, len(unbroken) - 2):
        again = steps(make, workers, last=3 * SIZE, first_sample=consumed[number], first_step=number + 1)
        assert again == unbroken[number + 1 :]


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(("workers", "global_batch", "accumulate"), [(1, 10, 1), (2, 9, 2), (4, 64, 2)])
def test_an_evaluation_is_one_pass_in_order(make, workers, global_batch, accumulate):
    found = steps(make, workers, None, global_batch, accumulate)
    assert sorted(joined(found)) == list(range(SIZE))
    if workers == 1:
        assert joined(found) == list(range(SIZE))


def test_what_every_worker_reads_has_one_order_at_any_number_of_workers():
    def batches(workers):
        return [sorted(joined([step])) for step in steps(MAKES["buffer"], workers, last=100)]

    assert batches(1) == batches(2) == batches(3)
    for make, workers, others in ((MAKES["buffer"], 3, {}), (from_shards, 2, {"global_batch": 24})):
        first = steps(make, 1 if make is not from_shards else 2, last=48)
        rest = steps(make, workers, last=SIZE, first_sample=48, **others)
        assert sorted(joined(first) + joined(rest)) == list(range(SIZE)), "also with another batch size"


@pytest.mark.parametrize("last_step", [1, 9, 21])
def test_dealt_shards_end_at_a_step(last_step):
    found = steps(from_shards, 2, last=12 * last_step, last_step=last_step)
    assert found == steps(from_shards, 2, last=10 * SIZE)[:last_step]
    rest = steps(from_shards, 2, last=10 * SIZE, first_sample=len(joined(found)), first_step=last_step,
                 last_step=last_step + 5)  # fmt: skip
    assert rest == steps(from_shards, 2, last=10 * SIZE)[last_step : last_step + 5]


def test_a_buffer_shuffles_and_holds_no_more_than_its_size():
    taken = []
    items = (taken.append(number) or number for number in range(1000))
    out = []
    for item in shuffled(items, 50, 3):
        out.append(item)
        assert len(taken) - len(out) <= 50
    assert sorted(out) == list(range(1000))
    assert sum(a + 1 == b for a, b in itertools.pairwise(out)) < 100


@pytest.mark.parametrize(("make", "workers"), [(whole, 1), (from_shards, 1), (from_shards, 2)])
def test_a_wrong_length_is_an_error_in_the_first_pass(make, workers):
    for length, said in ((80, "has more than the 80 samples"), (90, "had 83 samples; 90 were declared")):
        for last in (1000, length):  # also if training ends with the pass
            with pytest.raises(DataError, match=f"pass 1 over the stream {said}"):
                steps(lambda n=length: make(length=n), workers, last=last)
    assert len(joined(steps(lambda: make(length=80), workers, last=79))) == 79
    with pytest.raises(DataError, match="pass 1 over the stream has more than the 80 samples"):
        steps(lambda: make(length=80), workers, last=160, first_sample=70)


def test_a_source_that_is_used_up_is_an_error():
    numbers = {}

    def once(shard):
        return map(sample, numbers.setdefault(id(shard), iter(shard)))

    with pytest.raises(DataError, match="pass 2 over the stream gave no sample"):
        steps(lambda: hvdtrain.stream(once, shards=SHARDS[:2]), 1, last=1000)


@pytest.mark.parametrize("last", [None, 5000])
def test_workers_that_read_different_streams_are_told(last):
    sizes = iter([80, 90])
    with pytest.raises(DataError, match=r"read different streams: rank 0: .*; rank 1: .* of pass"):
        steps(lambda: whole(next(sizes)), 2, last=last)


@pytest.mark.parametrize("make", [int, lambda n: f"text {n}" * 50])
def test_workers_that_read_another_order_are_told(make):
    """Sources of equal size, of which one worker has two samples the other way round."""
    orders = [list(range(SIZE)), [*range(50), 51, 50, *range(52, SIZE)]]

    def read(orders):
        orders = iter(orders)
        return steps(
            lambda: hvdtrain.stream(list(map(make, next(orders))), decode=lambda _: sample(0)), 2, last=SIZE
        )

    with pytest.raises(DataError, match="read different streams: up to sample 82 of pass 1"):
        read(orders)
    assert read(orders[:1] * 2)


def test_the_order_of_shards_is_part_of_the_identity():
    def digest(*names):
        return hvdtrain.stream(list, shards=names).order_identity

    one = digest("/data/a/0.tar", "/data/b/0.tar")
    assert one == digest(*map(Path, ["/x/a/0.tar", "/x/b/0.tar"]))  # elsewhere on another host
    assert one != digest("/data/b/0.tar", "/data/a/0.tar")
    assert digest((1, "/x/a"), 2) == digest((1, "/y/a"), 2) != digest(2, (1, "/x/a"))
    assert digest(object(), object()) == digest(object(), object())


def test_padding_is_the_last_samples_in_turn_also_after_a_resume():
    """Batch norm counts padding: one sample over and over would have no variance."""
    unbroken = rows(0)
    short = [step for step in range(8) if unbroken[step][0].total_weight < 8]
    assert len(short) == 7
    for step in short:
        for batch in unbroken[step]:
            distinct = len(set(batch.arrays["targets"].reshape(-1).tolist()))
            assert distinct == 4
    consumed = np.cumsum([step[0].total_weight for step in unbroken]).astype(int).tolist()
    for done in range(1, 8):
        again = rows(consumed[done - 1])
        for before, after in zip(unbroken[done:], again, strict=True):
            for one, other in zip(before, after, strict=True):
                np.testing.assert_array_equal(one.arrays["targets"], other.arrays["targets"])


def rows(first_sample):
    """Return the batches of two workers, of which one has few samples, by step."""
    shards = [range(30), range(30, 34)]
    return batches_of(lambda: from_shards(shards), BatchPlan(8, 2), last_sample=34, first_sample=first_sample)


def test_a_stream_is_a_data_set_of_which_the_first_sample_is_read(monkeypatch):
    data = as_dataset(whole(length=50))
    assert len(data) == 50
    assert len(whole()) == UNKNOWN_LENGTH
    assert signature(data, "data") == {"inputs": "float32[2]", "targets": "int64[]"}
    assert fetch(data, np.zeros(1, np.int64))["targets"].tolist() == [0]
    with pytest.raises(DataError, match="cannot be read by its index"):
        data[3]
    with pytest.raises(DataError, match="Augmented needs data with an index"):
        Augmented(data, [])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hvdtrain.stream(x for x in []), "generator can be passed over only once"),
        (lambda: hvdtrain.stream([1], shards=["a"]), "source is a function that opens one"),
        (lambda: hvdtrain.stream(print, shards=[]), "shards is empty"),
        (lambda: len(signature(hvdtrain.stream(list), "data")), "gave no sample"),
        (lambda: as_dataset(iter([1])), "passed over only once. Give a list, or a function"),
    ],
)
def test_what_cannot_be_used_is_refused(make, message):
    with pytest.raises(DataError, match=message):
        make()


def test_a_stream_of_pytorch():
    class Numbers(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([{"inputs": torch.full((2,), float(n)), "targets": n} for n in range(SIZE)])

    assert sorted(joined(steps(lambda: hvdtrain.stream(Numbers()), 2, last=SIZE))) == list(range(SIZE))


def test_shards_of_hugging_face_are_told_the_epoch():
    class IterableDataset:
        __module__ = "datasets"
        num_shards = 3

        def __init__(self, numbers=range(9)):
            self.numbers, self.epoch = numbers, 0

        def shard(self, num_shards, index):
            return IterableDataset(self.numbers[index::num_shards])  # a new one, at epoch 0

        def set_epoch(self, epoch):
            self.epoch = epoch

        def __iter__(self):
            return iter([(number, self.epoch) for number in self.numbers])

    for shards in (None, [2, 0]):
        found = list(source_of(IterableDataset(), None, decodes=True).open(4, shards))
        assert {epoch for _, epoch in found} == {4}
        assert len(found) == 3 * len(shards or range(3))


def test_a_source_whose_passes_begin_with_the_same_numbers_in_another_order_is_noted():
    drawn = np.random.RandomState(0)

    def samples():
        yield {"inputs": drawn.permutation(np.arange(8, dtype=np.float32)), "targets": 0}

    data = hvdtrain.stream(samples, inputs="inputs", targets="targets", length=1)
    data.first()
    assert "different samples" in data.notes[0]
