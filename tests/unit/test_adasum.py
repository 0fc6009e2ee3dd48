"""Adasum: which jobs cannot have it, and what is combined as one, in both frameworks."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdtrain.backends import adasum as shared
from hvdtrain.backends.adasum import check_adasum, check_sizes
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.tensorflow import adasum as tensorflow_adasum
from hvdtrain.backends.tensorflow.model_state import ModelState as TensorFlowModel
from hvdtrain.backends.torch import adasum as torch_adasum
from hvdtrain.backends.torch.model_state import ModelState as TorchModel
from hvdtrain.bench.predict_scope import check_predictable
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, UsageError

HALF = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3, use_bias=False, dtype="float16", name="0")])
CONFIG = Config(framework="torch", sync_every=1, outer_optimizer="adasum")


class Horovod:
    """Stands for Horovod's binding of both frameworks; the other workers moved as this one did."""

    Adasum = "adasum"

    def __init__(self) -> None:
        self.sent: dict[str, object] = {}

    def allreduce(self, tensor, op, name):
        assert op == self.Adasum
        self.sent[name.removeprefix("hvdtrain.adasum.")] = tensor
        return tensor

    allreduce_async_ = allreduce

    def synchronize(self, handle):
        return handle


class Mixed(torch.nn.Module):
    """Tensors of which several, or parts, are one portable array, and one that has two names."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(4, 2)
        self.gru = torch.nn.GRU(4, 3)
        self.embedding = torch.nn.Embedding(5, 4)
        self.head = torch.nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight


def workers(size: int = 2, controller: str = "MPI") -> SimpleNamespace:
    return SimpleNamespace(size=size, controller=controller)


def test_jobs_without_adasum_and_single_workers_are_not_refused():
    check_adasum(CONFIG, workers(), on_gpu=False)
    check_adasum(CONFIG, workers(8), on_gpu=False)
    check_adasum(CONFIG, workers(1, "none"), on_gpu=True)
    check_adasum(CONFIG.model_copy(update={"outer_optimizer": "average"}), workers(3, "Gloo"), on_gpu=True)


@pytest.mark.parametrize(
    ("given", "on_gpu", "reason", "remedy"),
    [
        (workers(2, "Gloo"), False, "Gloo: Horovod has it over MPI alone", "horovodrun --mpi"),
        (workers(6), False, "6 workers: they are combined two by two", "another number of workers"),
        (workers(), True, "GPUs: there Horovod averages the workers of a host", "average or nesterov"),
    ],
)
def test_what_horovod_cannot_combine_is_refused(given, on_gpu, reason, remedy):
    with pytest.raises(ConfigError, match=f"outer_optimizer adasum cannot be used with {reason}") as caught:
        check_adasum(CONFIG, given, on_gpu)
    assert remedy in caught.value.remedy


def test_a_parameter_that_horovod_cannot_count_is_refused():
    check_sizes({"0/kernel": 2**31 - 1})
    with pytest.raises(ConfigError, match=r"0/kernel has 2\.0 GiB"):
        check_sizes({"0/kernel": 2**31})


def test_what_travels_as_four_bytes_is_counted_as_that(monkeypatch):
    checked = []
    for adasum, fields in (
        (torch_adasum, TorchModel(torch.nn.Linear(2, 3, bias=False).half(), Renaming(object(), "torch"))),
        (tensorflow_adasum, TensorFlowModel(HALF, Renaming(object(), "tf"))),
    ):
        monkeypatch.setattr(adasum, "check_sizes", checked.append)
        adasum.Adasum(fields.trainable_fields())
    assert [list(sizes.values()) for sizes in checked] == [[24], [24]]


@pytest.mark.parametrize("mpi", [None, "Open MPI 5.0.11"])
def test_without_mpi_the_remedy_is_to_build_with_it(mpi, monkeypatch):
    monkeypatch.setattr(shared, "installed_build", lambda: SimpleNamespace(mpi=mpi))
    with pytest.raises(ConfigError) as caught:
        check_adasum(CONFIG, workers(2, "Gloo"), on_gpu=True)
    assert ("horovodrun --mpi" if mpi else "build-horovod") in caught.value.remedy


def test_a_plan_of_more_hosts_refuses_it():
    with pytest.raises(UsageError, match="outer_optimizer adasum combines parameters"):
        check_predictable(CONFIG)


def test_what_is_one_array_in_keras_travels_as_one_in_pytorch(monkeypatch):
    monkeypatch.setattr(torch_adasum, "hvd", horovod := Horovod())
    module = Mixed()
    adasum = torch_adasum.Adasum(TorchModel(module, Renaming(object(), "torch")).trainable_fields())
    adasum.begin()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.5)
    moved = {name: value.detach().clone() for name, value in module.named_parameters()}
    adasum.combine()
    for name, value in module.named_parameters():
        torch.testing.assert_close(value, moved[name], rtol=0, atol=1e-6)
    sizes = [tensor.numel() for tensor in horovod.sent.values()]
    assert sum(sizes) == sum(parameter.numel() for parameter in module.parameters())
    # attention; kernels of the GRU and its bias, which is two tensors of PyTorch; the embedding
    assert sorted(sizes) == sorted([16, 4] * 4 + [36, 27, 18] + [20])


def test_numbers_of_two_bytes_travel_as_four(monkeypatch):
    monkeypatch.setattr(torch_adasum, "hvd", of_torch := Horovod())
    module = torch.nn.Linear(2, 2).bfloat16()
    adasum = torch_adasum.Adasum(TorchModel(module, Renaming(object(), "torch")).trainable_fields())
    adasum.begin()
    adasum.combine()
    assert {tensor.dtype for tensor in of_torch.sent.values()} == {torch.float32}
    monkeypatch.setattr(tensorflow_adasum, "hvd", of_keras := Horovod())
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(2, dtype="bfloat16", name="0")])
    fields = list(TensorFlowModel(model, Renaming(object(), "tf")).trainable_fields())
    adasum = tensorflow_adasum.Adasum(fields)
    adasum.begin()
    before = [field.read() for field in fields]
    adasum.combine()
    assert {tensor.dtype for tensor in of_keras.sent.values()} == {tf.float32}
    for field, expected in zip(fields, before, strict=True):
        np.testing.assert_array_equal(field.read(), expected)
