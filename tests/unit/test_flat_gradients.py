"""How gradients are divided into flat tensors, and taken out of them again."""

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdtrain.backends.reduction.shards import divide
from hvdtrain.backends.tensorflow import functions
from hvdtrain.backends.tensorflow.reduction import all_reduce as tensorflow_reduction
from hvdtrain.backends.tensorflow.reduction import flat as tensorflow_flat
from hvdtrain.backends.tensorflow.traced_workers import FixedSize
from hvdtrain.backends.torch.reduction import flat as torch_flat

MIB = 1 << 20
VARIABLES = [((5, 2), "float32"), ((2, 3), "float32"), ((1,), "float64")]
SHAPES = {"kernel": (5, 32), "bias": (7,), "scalar": (), "table": (16,), "empty": (0, 3)}


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


def given():
    random = np.random.RandomState(0)
    return {name: np.asarray(random.rand(*shape), np.float32) for name, shape in SHAPES.items()}


def test_tensorflow_takes_out_what_it_joined():
    arrays = given()

    @tf.function
    def there_and_back(gradients):
        found = {}
        for bucket in tensorflow_flat.make_buckets(gradients, are_several=False):
            flat = bucket.joined(gradients)
            assert flat.shape[1] == 16
            found |= bucket.parted(flat)
        return found

    gradients = {name: tf.constant(array) for name, array in arrays.items()}
    gradients["whole"] = tf.ones((4,), tf.float64)
    found = there_and_back(gradients)
    assert found.keys() == gradients.keys()
    assert found["whole"].numpy().tolist() == [1, 1, 1, 1]
    for name, array in arrays.items():
        assert found[name].shape == array.shape
        np.testing.assert_array_equal(found[name], array)


def test_pytorch_lends_parts_of_one_tensor_in_the_order_of_the_backward_pass():
    arrays = given()
    parameters = {name: torch.nn.Parameter(torch.from_numpy(array)) for name, array in arrays.items()}
    parameters["double"] = torch.nn.Parameter(torch.ones(2, dtype=torch.float64))
    buckets = torch_flat.make_buckets(parameters, are_several=False)
    assert [list(bucket.parameters) for bucket in buckets] == [["double"], list(reversed(SHAPES))]
    for bucket in buckets:
        bucket.lend()
    sum((parameter**2).sum() for parameter in parameters.values()).backward()
    for name, array in arrays.items():
        gradient = parameters[name].grad
        assert gradient.untyped_storage().data_ptr() == buckets[1].flat.untyped_storage().data_ptr()
        assert gradient.data_ptr() % 64 == buckets[1].flat.data_ptr() % 64
        np.testing.assert_allclose(gradient.numpy(), 2 * array)
    assert float(buckets[1].flat.sum()) == pytest.approx(2 * sum(a.sum() for a in arrays.values()))


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


def weights_of(*values):
    return {str(place): torch.nn.Parameter(torch.full((2,), value)) for place, value in enumerate(values)}


def test_a_part_that_was_given_other_memory_is_taken_in_and_made_anew():
    bucket = torch_flat.Bucket(weights_of(1.0, 1.0))
    for factor in (2.0, 3.0):
        bucket.lend()
        lent = list(bucket.parts)
        lent[1] += 1
        lent[0].data = torch.full((2,), factor)
        bucket.take_in(lent)
        del lent
        assert [part.tolist() for part in bucket.parts] == [2 * [factor], [1, 1]]
        assert bucket.flat[:2].tolist() == 2 * [factor]
        assert bucket.parts[0].data_ptr() == bucket.flat.data_ptr()
