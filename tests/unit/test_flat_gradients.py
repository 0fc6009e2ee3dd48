"""How gradients and parameters are divided into flat tensors; arrays in a file."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.backends.portable.training_state import Keeper
from hvdtrain.backends.reduction.shards import ALIGNMENT, divide, shard
from hvdtrain.backends.tensorflow import functions
from hvdtrain.backends.tensorflow.batches import FixedSize
from hvdtrain.backends.tensorflow.reduction import all_reduce as tensorflow_reduction

MIB = 1 << 20
VARIABLES = [((5, 2), "float32"), ((2, 3), "float32"), ((1,), "float64")]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([MIB] * 4, [["0"], ["1"], ["2"], ["3"]]),
        ([10, 20, 30], [["0", "1", "2"]]),
        ([10, 8 * MIB, MIB, MIB, 10], [["0", "1"], ["2", "3"], ["4"]]),
        ([], []),
    ],
)
def test_buckets_are_about_equal_and_not_too_small(sizes, expected):
    by_name = {str(place): size for place, size in enumerate(sizes)}
    assert divide(by_name, are_several=True) == expected
    assert divide(by_name, are_several=False) == ([list(by_name)] if sizes else [])


@pytest.mark.parametrize("reached", ["sparse", "of unknown shape", "not reached"])
def test_tensorflow_reduces_the_same_whatever_a_worker_reaches(monkeypatch, reached):
    """A trace that does not reach an embedding joins the reductions of one that does."""
    begun = []

    def allreduce(tensor, name, **_):
        begun.append((name, tuple(tensor.shape), tensor.dtype.name))
        return 2 * tensor

    monkeypatch.setattr(tensorflow_reduction.hvd, "allreduce", allreduce)
    table, kernel, wide = (keras.Variable(np.ones(shape), dtype=dtype) for shape, dtype in VARIABLES)
    zero = tf.Variable(0.0)

    @tf.function(input_signature=[tf.TensorSpec((None, 2)), tf.TensorSpec((None,), tf.int32)])
    def summed(values, rows):
        slices = tf.IndexedSlices(values, rows, tf.shape(values)[:1] * 0 + [5, 2])
        of_table = {"sparse": slices, "of unknown shape": values, "not reached": None}[reached]
        gradients = functions.dense([of_table, tf.ones((2, 3)), None], [table, kernel, wide], zero)
        reducer = tensorflow_reduction.AllReduce(FixedSize(2))
        reducer.overlaps = False
        return reducer.finish(gradients, tf.constant([1.0, 2.0, 3.0]))

    (of_table, of_kernel, of_wide), vector = summed(tf.ones((5, 2)), tf.range(5))
    kinds = [((1, 16), "float64"), ((2, 16), "float32")]
    assert begun == [(f"hvdtrain.gradients.{number}", *kind) for number, kind in enumerate(kinds)]
    assert of_table.numpy().tolist() == 5 * [[0, 0] if reached == "not reached" else [2, 2]]
    assert of_kernel.numpy().tolist() == 2 * [3 * [2]]
    assert of_wide.numpy().tolist() == [0]
    assert vector.numpy().tolist() == [2, 4, 6]


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
                assert segment.offset + segment.end - segment.begin <= bucket.part
                assert segment.begin % ALIGNMENT == segment.offset % ALIGNMENT == 0
                places[first : first + segment.end - segment.begin] += 1
        assert places.max(initial=0) <= 1
    assert all((owned == 1).all() for owned in owners.values())
    assert [name for bucket in shard(sizes, workers) for name in bucket.begins] == list(sizes)


def test_arrays_of_a_gathered_state_lie_in_a_file_without_a_name(tmp_path):
    folder = tmp_path / "checkpoints"
    keeper = Keeper(folder)
    keeper.keep_all([("a", np.full((3, 5), 2, np.float32)), ("b", np.arange(7)), ("a", np.zeros(1))])
    state = keeper.read()
    assert all(isinstance(array, np.memmap) for array in state.values())
    del keeper
    assert list(folder.iterdir()) == []
    assert (state["a"] == 2).all()
    assert state["b"].tolist() == list(range(7))
    assert state["b"].dtype == np.arange(7).dtype
