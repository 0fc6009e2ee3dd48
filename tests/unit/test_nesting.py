"""Nested batches are flat on their way; what holds no numbers is left out of records and of streams."""

import numpy as np
import pytest

import hvdtrain
from hvdtrain.data.numeric import flatten, merged_by_cast, nesting
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
        ({"inputs": {}}, "'inputs' is empty"),
        ({"inputs": {0: A, 1: B}}, "may not be whole numbers"),
        ({"inputs": {"a/b": A}}, "or contain '/'"),
        ({"inputs": {"a": A}, "inputs/a": B}, "two parts of a sample have the same name 'inputs/a'"),
    ],
)
def test_what_cannot_be_nested_again_is_refused(item, said):
    with pytest.raises(DataError, match=said):
        flatten(item)
    with pytest.raises(DataError, match="a batch has 'inputs' and parts of it"):
        nesting(["inputs", "inputs/a"])


def test_columns_without_numbers_are_left_out_with_a_note():
    records = [{"inputs": np.ones(2), "label": 3, "text": "a", "__key__": "b"}]
    data = hvdtrain.stream(lambda: iter(records), targets="label", length=1)
    data.first()
    assert {name: value.dtype.kind for name, value in data[0].items()} == {"inputs": "f", "targets": "i"}
    assert data.notes == ("the column text is left out: not numbers",)


RANDOM = np.random.RandomState(0)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (1e8 + RANDOM.randn(24, 3), 0),  # coordinates
        (np.stack([RANDOM.randn(5), 2.0**24 + np.arange(5)], 1), 1),  # numbers of rows
        (1 + 1e-9 * np.arange(9.0), 0),
        (RANDOM.randn(300_000), None),  # some become equal by chance
        (np.array([0.3, 0.1 + 0.2, 0.3]), None),  # that is rounding
        (np.array([np.nan, np.inf, 1.5, 1.5]), None),
    ],
)
def test_columns_whose_values_become_equal_in_32_bits_are_found(values, expected):
    found = merged_by_cast(values)
    assert (found and found[0]) == expected
