"""How gradients are divided into flat tensors, and what TensorFlow reduces of them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.reduction.shards import divide
from hvdtrain.backends.tensorflow import functions
from hvdtrain.backends.tensorflow.reduction import all_reduce as tensorflow_reduction
from hvdtrain.backends.tensorflow.traced_workers import FixedSize

MIB = 1 << 20
VARIABLES = [((5, 2), "float32"), ((2, 3), "float32"), ((1,), "float64")]


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([MIB] * 4, [["0"], ["1"], ["2"], ["3"]]),
        ([MIB] * 16, [["0"], *([str(i), str(i + 1)] for i in range(1, 15, 2)), ["15"]]),
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
        reducer = tensorflow_reduction.AllReduce(FixedSize(2), overlaps=False)
        return reducer.finish(gradients, tf.constant([1.0, 2.0, 3.0]))

    (of_table, of_kernel, of_wide), vector = summed(tf.ones((5, 2)), tf.range(5))
    assert begun == [
        ("hvdtrain.gradients.0", (1, 16), "float64"),
        ("hvdtrain.gradients.1", (2, 16), "float32"),
    ]
    assert of_table.numpy().tolist() == 5 * [[0, 0] if reached == "not reached" else [2, 2]]
    assert of_kernel.numpy().tolist() == 2 * [3 * [2]]
    assert of_wide.numpy().tolist() == [0]
    assert vector.numpy().tolist() == [2, 4, 6]
