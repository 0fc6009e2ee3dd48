"""What a plan times of encoding, in both frameworks: with their own reducers, for one worker alone."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvdtrain.bench.predict_ways import GRADIENT, low_rank
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


def check_numbers(numbers) -> None:
    assert 0.5 * GRADIENT < np.std(numbers) < 2 * GRADIENT, "sums of zeros would take less time than a job's"


def test_torch_sums_numbers_like_those_of_gradients(monkeypatch):
    sums = []

    def allreduce(tensor, **options):
        sums.append((tensor.clone(), options))
        tensor.mul_(2 * options["postscale_factor"])

    monkeypatch.setattr(torch_encoding.hvd, "size", lambda: 2)
    monkeypatch.setattr(torch_encoding.hvd, "allreduce_async_", allreduce)
    monkeypatch.setattr(torch_encoding.hvd, "synchronize", lambda handle: handle)
    reduce = torch_encoding.half_sum_of(SHAPES, False)
    for _ in range(20):
        reduce()
    for tensor, options in sums:
        assert (tensor.dtype, options["postscale_factor"]) == (torch.float16, 0.5)
        check_numbers(tensor.float().numpy())


def test_tensorflow_sums_numbers_like_those_of_gradients(monkeypatch):
    sums = []

    def allreduce(tensor, **options):
        sums.append((tensor.dtype.name, options["postscale_factor"]))
        return tensor

    monkeypatch.setattr(tensorflow_encoding.hvd, "size", lambda: 2)
    monkeypatch.setattr(tensorflow_encoding.hvd, "allreduce", allreduce)
    tensorflow_encoding.half_sum_of(SHAPES, False)()
    assert sums == [("float16", 0.5)]
    check_numbers(tensorflow_encoding._gradients(SHAPES, False).numpy())


def test_torch_rounds_as_a_job_does_again_and_again(monkeypatch):
    seen = []
    cast = torch_encoding.Bucket.cast

    def noted(bucket, kind, factor):
        assert factor != 1, "the job multiplies"
        seen.append(cast(bucket, kind, factor).float().numpy().copy())
        return cast(bucket, kind, 1)

    monkeypatch.setattr(torch_encoding.Bucket, "cast", noted)
    encode = torch_encoding.half_of(SHAPES, False)
    for _ in range(20):
        encode()
    for numbers in seen:
        check_numbers(numbers)


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
