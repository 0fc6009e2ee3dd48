"""How parameters are divided among workers, what that refuses, and arrays in a file."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.backends.portable.training_state import Spool
from hvdtrain.backends.reduction.shards import ALIGNMENT, shard

MEBI = 1 << 20


@given(st.lists(st.integers(0, 300), max_size=12), st.integers(1, 7))
def test_every_number_of_every_parameter_is_owned_exactly_once(lengths, workers):
    sizes = {f"p{i}": length for i, length in enumerate(lengths)}
    owners = {name: np.zeros(size, int) for name, size in sizes.items()}
    for bucket in shard(sizes, workers):
        assert bucket.part % ALIGNMENT == 0
        places = np.zeros(bucket.length, int)
        for rank, segments in enumerate(bucket.segments):
            for segment in segments:
                owners[segment.name][segment.begin : segment.end] += 1
                first = rank * bucket.part + segment.offset
                assert first == bucket.begins[segment.name] + segment.begin
                assert segment.offset + segment.length <= bucket.part
                assert segment.begin % ALIGNMENT == segment.offset % ALIGNMENT == 0
                places[first : first + segment.length] += 1
        assert places.max(initial=0) <= 1
    assert all((owned == 1).all() for owned in owners.values())
    assert [name for bucket in shard(sizes, workers) for name in bucket.begins] == list(sizes)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([3 * MEBI, MEBI, 1, 3 * MEBI], [["0", "1"], ["2", "3"]]),  # 16 MiB at most
        ([20 * MEBI, 5], [["0"], ["1"]]),  # or one parameter
        ([2 * MEBI] * 16, [[str(i), str(i + 1)] for i in range(0, 16, 2)]),
        ([], []),
    ],
)
def test_buckets_are_small(sizes, expected):
    buckets = shard({str(i): size for i, size in enumerate(sizes)}, 4)
    assert [list(bucket.begins) for bucket in buckets] == expected


def test_arrays_of_a_spool_lie_in_a_file_without_a_name(tmp_path):
    folder = tmp_path / "checkpoints"
    spool = Spool(folder)
    first, second = spool.empty((3, 5), np.float32), spool.keep(np.arange(7))
    first[...] = 2
    assert isinstance(first, np.memmap)
    assert isinstance(second, np.memmap)
    del spool
    assert list(folder.iterdir()) == []
    assert (first == 2).all()
    assert second.tolist() == list(range(7))
    assert second.dtype == np.arange(7).dtype
