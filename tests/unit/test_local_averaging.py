"""How local steps make workers equal: here a single process, whose other worker has ones everywhere."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.reduction import local_steps
from hvdtrain.backends.reduction.local_steps import OuterOptimizer, check_averaged, in_parts
from hvdtrain.backends.tensorflow.state.ema import ExponentialMovingAverage as TensorFlowAverage
from hvdtrain.backends.tensorflow.state.model_state import ModelState as TensorFlowModel
from hvdtrain.backends.tensorflow.steps import local_step as tensorflow_steps
from hvdtrain.backends.tensorflow.steps.optimizer_state import TrainingState as TensorFlowState
from hvdtrain.backends.torch.state.ema import ExponentialMovingAverage as TorchAverage
from hvdtrain.backends.torch.state.model_state import ModelState as TorchModel
from hvdtrain.backends.torch.steps import local_step as torch_steps
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState as TorchState
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError

AVERAGE, OF_ALL = OuterOptimizer("average", 0.7, 0.9), SimpleNamespace(size=2)
NO_SAMPLES = SimpleNamespace(total_weight=1.0, reduced_weight=0.0)
MIB = 1 << 20


class Horovod:
    """Stands for Horovod's binding of both frameworks."""

    Average, Sum = "average", "sum"

    def __init__(self) -> None:
        self.names: list[str] = []

    def allreduce(self, tensor, op, name):
        self.names.append(name)
        return (tensor + 1) / 2 if op == self.Average else tensor + 1

    def allreduce_(self, tensor, op, name):
        return tensor.copy_(self.allreduce(tensor, op, name))


class TorchSide:
    """A model of two layers, its optimizer and its local steps, in PyTorch."""

    def __init__(self, optimizer, horovod, monkeypatch) -> None:
        monkeypatch.setattr(torch_steps, "hvd", horovod)
        model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        tensors = TorchModel(model, Renaming(object(), "torch"))
        self.parameters = [entry.tensor for entry in tensors.entries]
        self.optimizer = getattr(torch.optim, optimizer)(self.parameters, lr=0.5, weight_decay=0.25)
        ema = TorchAverage(tensors, None)
        self.local = torch_steps.LocalSteps(tensors, self.optimizer, ema, AVERAGE, workers=OF_ALL)
        self._state = TorchState(tensors, self.optimizer, ema, self.local)
        self.vector = torch.zeros(1)

    def step(self) -> None:
        for parameter in self.parameters:
            parameter.grad = torch.full_like(parameter, 0.5)
        self.optimizer.step()

    def state(self):
        return self._state.snapshot().read()


class TensorFlowSide:
    """The same in Keras."""

    def __init__(self, optimizer, horovod, monkeypatch) -> None:
        monkeypatch.setattr(tensorflow_steps, "hvd", horovod)
        model = keras.Sequential(
            [keras.Input((3,)), keras.layers.Dense(4, name="0"), keras.layers.Dense(2, name="1")]
        )
        tensors = TensorFlowModel(model, Renaming(object(), "tf"))
        self.parameters = model.trainable_variables
        self.optimizer = getattr(keras.optimizers, optimizer)(0.5, weight_decay=0.25)
        self.optimizer.build(self.parameters)
        ema = TensorFlowAverage(tensors, None)
        self.local = tensorflow_steps.LocalSteps(tensors, self.optimizer, ema, AVERAGE, workers=OF_ALL)
        self._state = TensorFlowState(tensors, self.optimizer, ema, self.local)
        self.vector = tf.zeros((1,))

    def step(self) -> None:
        gradients = [tf.fill(parameter.shape, 0.5) for parameter in self.parameters]
        self.optimizer.apply(gradients, self.parameters)

    def state(self):
        return self._state.snapshot().read()


@pytest.fixture(params=[TorchSide, TensorFlowSide])
def make(request, monkeypatch):
    return lambda optimizer, horovod: request.param(optimizer, horovod, monkeypatch)


def add(side, step: int) -> None:
    batch = SimpleNamespace(step=step, **vars(NO_SAMPLES))
    side.local.add(batch, ("loss",), (), side.vector, ())


@pytest.mark.parametrize("part_bytes", [64 * MIB, 64])
def test_everything_is_averaged_in_few_messages(make, monkeypatch, part_bytes):
    monkeypatch.setattr(local_steps, "_PART_BYTES", part_bytes)
    side = make("Adam", horovod := Horovod())
    side.local.begin()
    side.step()
    add(side, 0)
    before = side.state()
    side.local.synchronize()
    after = side.state()
    assert len(before) == 13  # four parameters, two moments of each, and the count of steps
    for name, array in before.items():
        expected = 1 if name == "optimizer/step" else (array + 1) / 2
        np.testing.assert_allclose(after[name], expected, rtol=1e-6, err_msg=name)
    assert horovod.names[-1] == "hvdtrain.metrics"
    sent = horovod.names[:-1]
    assert len(set(sent)) == len(sent)
    assert (len(sent) == 1) == (part_bytes == 64 * MIB)


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop"])
def test_a_step_counts_for_a_worker_that_had_no_samples_in_it(make, optimizer):
    """Otherwise the checkpoint that rank 0 writes depends on whether it had some."""
    side = make(optimizer, Horovod())
    side.local.begin()
    side.step()
    add(side, 0)
    side.local.begin()
    add(side, 1)
    side.local.synchronize()
    assert side.state()["optimizer/step"] == 2
    side.local.begin()
    add(side, 2)
    side.local.synchronize()
    assert side.state()["optimizer/step"] == 3


@pytest.mark.parametrize("optimizer", ["Adam", "SGD"])
def test_a_worker_that_took_no_step_yet_has_the_same_tensors_to_average(make, optimizer):
    side, other = make(optimizer, Horovod()), make(optimizer, Horovod())
    for one in (side, other):
        one.local.begin()
    other.step()
    for one in (side, other):
        before = one.state()
        add(one, 0)
        one.local.synchronize()
        after = one.state()
        for name in before.keys() - {"optimizer/step"}:
            np.testing.assert_allclose(after[name], (before[name] + 1) / 2, rtol=1e-6, err_msg=name)
    found, expected = side.state(), other.state()
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in expected.items()}
    moments = [array for name, array in found.items() if "moment" in name]
    assert all((array == 0.5).all() for array in moments)  # zeros here, ones there


def test_parts_have_one_type_and_a_bounded_size():
    sizes = [("a", 40 * MIB), ("b", MIB), ("a", 30 * MIB), ("a", 30 * MIB), ("b", MIB), ("a", 90 * MIB)]
    assert in_parts(sizes) == [[0], [1, 4], [2, 3], [5]]
    assert not in_parts([])


@pytest.mark.parametrize("module", [torch_steps, tensorflow_steps])
def test_an_optimizer_that_nothing_is_known_of_is_refused(module):
    class Own(torch.optim.Adam if module is torch_steps else keras.optimizers.Adam):
        pass

    method = "torch_optimizer" if module is torch_steps else "tf_optimizer"
    optimizer = Own([torch.zeros(1)]) if module is torch_steps else Own()
    config = Config(framework=method.partition("_")[0], sync_every=4)
    with pytest.raises(ConfigError, match=f"the optimizer Own of {method}") as caught:
        check_averaged(optimizer, module.LocalSteps.averaged, method, config)
    assert "Adam, AdamW" in caught.value.remedy
    check_averaged(optimizer, [Own], method, config)
