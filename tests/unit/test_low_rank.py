"""PowerSGD without a framework: what becomes a matrix, what a checkpoint has of it, what is refused."""

import numpy as np
import pytest

from hvdtrain.backends.reduction.low_rank import (
    check_kept,
    error_name,
    factor_name,
    first_factor,
    fitting_state,
    matrix_shape,
    split_state,
)
from hvdtrain.config.values import rank_of
from hvdtrain.errors import TaskError

KEPT = {error_name("a/kernel"): np.ones((3, 4)), factor_name("a/kernel"): np.ones((4, 1))}
REST = {"model/a/kernel": np.zeros((3, 4)), "optimizer/step": np.zeros(())}


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((100, 50), 4, (100, 50)),
        ((3, 3, 64, 128), 4, (576, 128)),  # a convolution
        ((128, 4, 32), 4, (128, 128)),  # into the heads of an attention
        ((4, 32, 128), 4, (128, 128)),  # and out of them
        ((100,), 1, None),
        ((), 1, None),
        ((2, 100_000), 1, None),  # less than half is never saved
        ((30, 30), 8, None),
        ((30, 30), 7, (30, 30)),
    ],
)
def test_a_gradient_is_divided_where_rows_and_columns_are_fewest(shape, rank, expected):
    assert matrix_shape(shape, rank) == expected


def test_the_first_factor_is_orthonormal_and_follows_from_seed_and_name():
    q = first_factor("a/kernel", 20, 4, 0)
    np.testing.assert_allclose(q.T @ q, np.eye(4), atol=1e-6)
    np.testing.assert_array_equal(q, first_factor("a/kernel", 20, 4, 0))
    assert not np.allclose(q, first_factor("b/kernel", 20, 4, 0))
    assert not np.allclose(q, first_factor("a/kernel", 20, 4, 1))


@pytest.mark.parametrize(
    "value", ["none", "fp16", "powersgd", "powersgd:", "powersgd:04", "powersgd:٤", "x:4"]
)
def test_a_text_that_is_no_rank_has_none(value):
    assert rank_of(value) is None


def test_a_state_is_split_into_what_compression_keeps_and_the_rest():
    rest, kept = split_state({**REST, **KEPT})
    assert rest.keys() == REST.keys()
    assert kept.keys() == KEPT.keys()


@pytest.mark.parametrize(
    ("state", "rank", "before", "keeps", "said"),
    [
        ({**REST, **KEPT}, 1, 1, True, ""),
        ({**REST, **KEPT}, None, 1, False, "what PowerSGD had not sent yet is dropped"),
        ({**REST, **KEPT}, 2, 1, False, "rank 1 had not sent yet is dropped, and rank 2 starts anew"),
        (REST, 1, None, False, "its error starts from zero"),
        (REST, None, None, False, ""),
    ],
)
def test_a_checkpoint_of_another_compression_is_said(state, rank, before, keeps, said):
    found, note = fitting_state(state, rank, before)
    assert (found.keys() == state.keys()) if keeps else (found.keys() == REST.keys())
    assert said in note
    assert bool(said) == bool(note)


def test_errors_of_another_model_are_refused():
    shapes = {name: array.shape for name, array in KEPT.items()}
    check_kept(KEPT, shapes)
    check_kept({}, shapes)
    with pytest.raises(TaskError, match=r"compression/error/a/kernel must be \(5, 4\), is \(3, 4\)"):
        check_kept(KEPT, {**shapes, error_name("a/kernel"): (5, 4)})
