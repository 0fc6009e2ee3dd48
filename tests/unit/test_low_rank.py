"""PowerSGD without a framework: what becomes a matrix, what a checkpoint has of it, what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.backends.reduction import fitting_state
from hvdtrain.backends.reduction.low_rank import CommonLowRank, matrix_shape, orthonormal
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

KEPT = {"compression/error/a/kernel": np.ones((3, 4)), "compression/q/a/kernel": np.ones((4, 1))}
REST = {"model/a/kernel": np.zeros((3, 4)), "optimizer/step": np.zeros(())}


@pytest.mark.parametrize(
    ("shape", "rank", "expected"),
    [
        ((100, 50), 4, (100, 50)),
        ((3, 3, 64, 128), 4, (576, 128)),  # a convolution
        ((128, 4, 32), 4, (128, 128)),  # into the heads of an attention
        ((2, 100_000), 1, None),  # less than half is never saved
        ((30, 30), 8, None),
        ((30, 30), 7, (30, 30)),
    ],
)
def test_a_gradient_is_divided_where_rows_and_columns_are_fewest(shape, rank, expected):
    assert matrix_shape(shape, rank) == expected


def test_directions_are_orthonormal_and_those_of_other_numbers_are_not_finite():
    random = np.random.RandomState(0)
    arrays = [random.randn(count, 4).astype(np.float32) * 1e-30 for count in (3000, 9)]
    arrays[0][:, 2] = arrays[0][:, 0] + 1e-4 * arrays[0][:, 1]  # depends on those before it
    arrays[0][:, 3] += arrays[0][:, 0] * 1000
    for found in orthonormal(arrays):
        products = found.astype(np.float64).T @ found
        np.testing.assert_allclose(products, np.diag(np.diag(products) > 0.5), atol=1e-6)
    arrays[0][5, 1] = np.nan
    found = orthonormal(arrays)
    assert not np.isfinite(found[0]).all()
    assert np.isfinite(found[1]).all()


@pytest.mark.parametrize(
    ("state", "compression", "before", "keeps", "said"),
    [
        ({**REST, **KEPT}, "powersgd:1", "powersgd:1", True, ""),
        ({**REST, **KEPT}, "none", "powersgd:1", False, "what PowerSGD had not sent yet is dropped"),
        ({**REST, **KEPT}, "powersgd:2", "powersgd:1", False, "is dropped, and rank 2"),
        (REST, "powersgd:1", "none", False, "its error starts from zero"),
        (REST, "none", "fp16", False, ""),
    ],
)
def test_a_checkpoint_of_another_compression_is_said(state, compression, before, keeps, said):
    found, note = fitting_state(state, compression, before)
    assert (found.keys() == state.keys()) if keeps else (found.keys() == REST.keys())
    assert said in note
    assert bool(said) == bool(note)


def test_errors_of_another_model_are_refused():
    class Keeping(CommonLowRank):
        def _make_matrices(self, fields, seed):
            self._all = [SimpleNamespace(path="a/kernel", portable_shape=fields[0], first=np.zeros((4, 1)))]

    with pytest.raises(TaskError, match=r"compression/error/a/kernel must be \(5, 4\), is \(3, 4\)"):
        Keeping(Config(framework="torch"), SimpleNamespace(size=2), [(5, 4)]).load({**REST, **KEPT})
