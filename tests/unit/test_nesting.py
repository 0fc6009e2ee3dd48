"""Nested batches have flat names on their way, and are nested again at its end."""

import numpy as np
import pytest

from hvdtrain.data.numeric import flatten, nesting
from hvdtrain.errors import DataError

A, B = np.ones((2, 3)), np.zeros((2, 1))
NESTED = [
    {"inputs": {"a": A, "b": B}, "targets": B},
    {"inputs": (A, B), "targets": {"x": A}},
    {"inputs": tuple([A] * 12)},
]


@pytest.mark.parametrize("item", NESTED, ids=lambda item: " ".join(flatten(item)))
def test_what_is_flattened_is_nested_again(item):
    flat = flatten(item)
    assert all(isinstance(value, np.ndarray) for value in flat.values())
    np.testing.assert_equal(nesting(flat)(flat), item)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ({"inputs": {"a": {"b": A}}}, "'inputs' is nested twice"),
        ({"inputs": ((A, B), A)}, "'inputs' is nested twice"),
        ({"inputs": {}}, "'inputs' is empty"),
        ({"inputs": {0: A, 1: B}}, "may not be whole numbers"),
        ({"inputs": {"a/b": A}}, "or contain '/'"),
        ({"inputs": {"a": A}, "inputs/a": B}, "two parts of a sample have the same name 'inputs/a'"),
    ],
)
def test_what_cannot_be_nested_again_is_refused(item, said):
    with pytest.raises(DataError, match=said):
        flatten(item)


def test_a_name_for_an_array_and_for_parts_is_refused():
    with pytest.raises(DataError, match="a batch has 'inputs' and parts of it"):
        nesting(["inputs", "inputs/a"])
