"""What a plan times of encoding, in both frameworks: with their own reducers, for one worker alone."""

from types import SimpleNamespace

import pytest
import torch

from hvdtrain.bench.predict_ways import low_rank
from hvdtrain.bench.tensorflow import encoding as tensorflow_encoding
from hvdtrain.bench.torch import encoding as torch_encoding
from hvdtrain.errors import UsageError

SHAPES = [(64, 48), (3, 3, 8, 16), (48,), ()]


@pytest.mark.parametrize("module", [torch_encoding, tensorflow_encoding])
def test_gradients_are_encoded_again_and_again(module):
    for encode in (
        module.half_of(SHAPES, False),
        module.low_rank_of(SHAPES, 2, False),
        module.low_rank_of([(5,)], 2, False),  # nothing becomes a matrix
    ):
        encode()
        encode()


def test_low_rank_does_what_a_job_does(monkeypatch):
    seen = []
    finish = torch_encoding.LowRank.finish

    def noted(reducer, gradients):
        seen.append(reducer.describe())
        return finish(reducer, gradients)

    monkeypatch.setattr(torch_encoding.LowRank, "finish", noted)
    torch_encoding.low_rank_of(SHAPES, 2, False)()
    sent = low_rank(SHAPES, 2).bytes_per_step / 1e6
    assert seen[0].startswith(f"fp32, sent by PowerSGD of rank 2: {sent:.3g} MB of")


def test_sparse_gradients_are_refused():
    dense = torch.nn.Sequential(torch.nn.Embedding(4, 2), torch.nn.Linear(2, 2))
    torch_encoding.check_dense(SimpleNamespace(model=dense))
    sparse = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Embedding(4, 2, sparse=True))
    with pytest.raises(UsageError, match="1 has sparse gradients") as error:
        torch_encoding.check_dense(SimpleNamespace(model=sparse))
    assert error.value.everywhere
    tensorflow_encoding.check_dense(SimpleNamespace())
