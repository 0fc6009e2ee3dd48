"""How gradients are divided into flat tensors, and taken out of them again."""

import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdtrain.backends.portable.buckets import divide
from hvdtrain.backends.tensorflow import flat as tensorflow_flat
from hvdtrain.backends.torch import flat as torch_flat

MIB = 1 << 20
SHAPES = {"kernel": (5, 32), "bias": (7,), "scalar": (), "table": (16,), "empty": (0, 3)}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([MIB] * 4, [["0"], ["1"], ["2"], ["3"]]),
        ([MIB] * 8, [["0", "1"], ["2", "3"], ["4", "5"], ["6", "7"]]),
        ([10, 20, 30], [["0", "1", "2"]]),
        ([MIB, 8 * MIB, MIB], [["0", "1"], ["2"]]),
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


def test_gradients_of_unknown_shape_are_in_no_bucket():
    @tf.function(input_signature=[tf.TensorSpec((None, 3))])
    def names(gradient):
        (bucket,) = tensorflow_flat.make_buckets(
            {"known": tf.ones(3), "unknown": gradient}, are_several=False
        )
        assert bucket.names == ["known"]
        return gradient

    names(tf.ones((2, 3)))


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


def test_fp16_takes_a_factor_before_it_rounds():
    bucket = torch_flat.Bucket({"weight": torch.nn.Parameter(torch.ones(3))})
    bucket.take_in([torch.full((3,), 1e-5)])
    expected = torch.full((3,), 3 * 1e-5).to(torch.float16)
    assert bucket.as_fp16(3)[:3].tolist() == expected.tolist()
