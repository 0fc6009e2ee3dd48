"""PowerSGD in whole steps: errors and Q move with the parameters, when all sums of a step have succeeded."""

import time

import horovod.tensorflow as hvd
import keras
import numpy as np
import pytest
import tensorflow as tf
import torch
from horovod.common.exceptions import HorovodInternalError
from support.faked_horovod import FakedHorovod
from support.fakes import FakeWorkers
from support.torch_steps import INPUTS, OUTPUTS, SAMPLES, X, Y, backend_of, step
from torch import nn

from hvdtrain.backends.tensorflow.backend import TensorFlowBackend
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import PeerLostError

UNITS = 12  # the layer between two others has a matrix of low rank
FRAMEWORKS = ("torch", "tensorflow")
COMPRESSED, UNCOMPRESSED = ["p", "q"], ["uncompressed"]


class Layers:
    """Three layers; without the middle one, nothing becomes a matrix of low rank."""

    loss = "mse"
    units = (UNITS, UNITS, OUTPUTS)

    def torch_model(self):
        sizes = zip((INPUTS, *self.units), self.units, strict=False)
        model = nn.Sequential(*(nn.Linear(*pair) for pair in sizes))
        for number, parameter in enumerate(model.parameters()):
            with torch.no_grad():
                parameter.copy_(
                    torch.linspace(-0.5, 0.4, parameter.numel()).view_as(parameter) / (number + 1)
                )
        return model

    def tf_model(self):
        model = keras.Sequential([keras.Input((INPUTS,)), *map(keras.layers.Dense, self.units)])
        for number, variable in enumerate(model.trainable_variables):
            size = int(np.prod(variable.shape))
            variable.assign(np.linspace(-0.5, 0.4, size).reshape(variable.shape) / (number + 1))
        return model


class Few(Layers):
    units = (4, OUTPUTS)


class Odd(Layers):
    """It has a metric that is no number."""

    loss = None

    def torch_loss(self, model, batch):
        losses = ((model(batch["inputs"]) - batch["targets"]) ** 2).mean(1)
        return losses, {"odd": losses.detach() * float("nan")}

    def tf_loss(self, model, batch):
        losses = tf.reduce_mean((model(batch["inputs"]) - batch["targets"]) ** 2, 1)
        return losses, {"odd": losses * float("nan")}


class Torch:
    """A worker of PyTorch, one of two that are threads."""

    prefix = "torch."

    def __init__(self, horovod, workers):
        self._horovod, self._workers = horovod, workers
        self.begun = horovod.begun[workers.rank]

    def build(self, task, **fields):
        self.backend = backend_of(self._workers, task, compression="powersgd:2", **fields)

    def fail(self, name):
        self._horovod.failing[self._workers.rank] = name

    def step(self, number, accumulate=1, **fields):
        return step(self.backend, number, accumulate, **fields)

    def finish_with(self, vector):
        gradients = [torch.ones_like(p) for p in self.backend.model.parameters()]
        return self.backend._reducer.finish_with(gradients, torch.from_numpy(vector))[1].numpy()

    def low_rank(self):
        return {name: tensor.numpy().copy() for name, tensor in self.backend._reducer.to_broadcast()}

    def loss_scale(self):
        scale = self.backend._loss_scale
        return {} if scale is None else {"scale": scale.to_broadcast().numpy()}


class TensorFlow:
    """A worker of TensorFlow, whose sums are twice its own numbers; a sum fails later than others succeed."""

    prefix = ""

    def __init__(self, monkeypatch):
        self.begun, self._failing = [], None
        monkeypatch.setattr(hvd, "allreduce", self._allreduce)

    def build(self, task, **fields):
        self.backend = TensorFlowBackend(FakeWorkers(0, ["here", "here"], None, [b""] * 2), "CPU")
        config = Config(framework="tf", device="cpu", threads=1, compression="powersgd:2", **fields)
        self.backend.build(task, config)

    def fail(self, name):
        self._failing = name

    def step(self, number, accumulate=1, *, times=1, in_warmup=False):
        places = np.arange(SAMPLES).reshape(accumulate, -1)
        arrays = {"inputs": X[places] * np.float32(times), "targets": Y[places]}
        weights = np.ones(places.shape, np.float32)
        host = HostBatch(number, arrays, weights, 2.0 * SAMPLES, places, in_warmup=in_warmup)
        (batch,) = self.backend.to_device([host])
        return self.backend.train_step(batch, 0.01).read().sums["loss"]

    def finish_with(self, vector):
        gradients = [tf.ones(v.shape) for v in self.backend.model.trainable_variables]
        traced = tf.function(lambda v: self.backend._reducer.finish_with(gradients, v)[1], autograph=False)
        try:
            return traced(tf.constant(vector)).numpy()
        except tf.errors.OpError as error:
            raise HorovodInternalError from error

    def low_rank(self):
        return {str(place): v.numpy() for place, v in enumerate(self.backend._reducer.to_broadcast())}

    def loss_scale(self):
        return {f"scale {place}": v.numpy() for place, v in enumerate(self.backend._scale_variables())}

    def _allreduce(self, tensor, *, name, op, ignore_name_scope=False):
        del op, ignore_name_scope

        def summed(values):
            self.begun.append(name)
            if name == self._failing:
                time.sleep(0.2)
                raise HorovodInternalError("a worker was lost, for a test")
            return 2 * values

        # as Horovod's, it waits for its input alone
        return tf.ensure_shape(
            tf.numpy_function(summed, [tensor], tensor.dtype, stateful=False), tensor.shape
        )


@pytest.fixture(params=FRAMEWORKS)
def on_workers(request, monkeypatch):
    """Call a function with each worker."""
    if request.param == "tensorflow":
        return lambda work: work(TensorFlow(monkeypatch))
    horovod = FakedHorovod(monkeypatch)
    return lambda work: horovod.run(lambda workers: work(Torch(horovod, workers)))


def ways(names):
    """Give the parts of messages' names that say what they have; all must be of PowerSGD."""
    assert all(name.startswith("hvdtrain.low_rank.") for name in names), names
    return [name.split(".")[2] for name in names]


def everything(worker):
    found = {**worker.backend._state.snapshot().read(), **worker.low_rank(), **worker.loss_scale()}
    return {name: np.array(value) for name, value in found.items()}


def check_same(found, expected, where=""):
    assert found.keys() == expected.keys()
    differ = [name for name, value in found.items() if value.tobytes() != expected[name].tobytes()]
    assert not differ, (where, differ)


@pytest.mark.parametrize(
    "fields", [{"momentum": 0.9, "ema_decay": 0.9}, {"accumulate": 2}, {"precision": "fp16"}], ids=str
)
def test_a_sum_that_fails_leaves_errors_and_q_as_they_were(on_workers, fields):
    """The step is then done again, and nothing shows that it was disturbed."""
    accumulate = fields.get("accumulate", 1)

    def work(worker):
        def train(number):
            return worker.step(number, accumulate, in_warmup=number == 1)

        worker.build(Layers(), **fields)
        losses, names = [], []
        for number in range(4):
            before = len(worker.begun)
            losses.append(train(number))
            names.append(worker.begun[before:])
        assert list(map(ways, names)) == [COMPRESSED, UNCOMPRESSED, COMPRESSED, COMPRESSED]
        expected = everything(worker)
        worker.build(Layers(), **fields)
        for number, loss in enumerate(losses):
            before = everything(worker)
            for name in names[number]:
                worker.fail(name)
                with pytest.raises(PeerLostError):
                    train(number)
                check_same(everything(worker), before, f"{name}, step {number}")
            worker.fail(None)
            assert train(number) == loss
        check_same(everything(worker), expected)
        assert any(value.any() for value in worker.low_rank().values())

    on_workers(work)


def test_a_step_that_is_skipped_leaves_errors_and_q_as_they_were(on_workers):
    def work(worker):
        worker.build(Layers(), precision="fp16")
        worker.step(0)
        for in_warmup in (False, True):
            before = everything(worker)
            worker.step(1, times=1e4, in_warmup=in_warmup)
            after = everything(worker)
            scales = [name for name in before if name.startswith("scale")]
            assert any((before[name] != after[name]).any() for name in scales)
            for name in scales:
                del before[name], after[name]
            check_same(after, before, f"{in_warmup=}")

    on_workers(work)


def test_a_metric_that_is_no_number_does_not_hold_up_errors_and_q(on_workers):
    """Unlike a gradient that is not finite."""

    def work(worker):
        found = []
        for task in (Layers(), Odd()):
            worker.build(task)
            for number in range(3):
                worker.step(number)
            found.append(worker.low_rank())
        check_same(*found)

    on_workers(work)


def test_without_matrices_a_step_has_one_message(on_workers):
    def work(worker):
        worker.build(Few())
        for number in range(2):
            worker.step(number, in_warmup=number == 1)
        assert ways(worker.begun) == 2 * UNCOMPRESSED

    on_workers(work)


def test_a_vector_of_another_type_travels_beside_the_last_message(on_workers):
    def work(worker):
        worker.build(Layers())
        worker.step(0)
        for in_warmup, way in ((False, "q"), (True, "uncompressed")):
            worker.backend._reducer.follow(in_warmup)
            before, vector = everything(worker), np.arange(3, dtype=np.float64)
            name = f"hvdtrain.low_rank.{way}.{worker.prefix}float64"
            worker.fail(name)
            with pytest.raises(HorovodInternalError):
                worker.finish_with(vector.copy())
            check_same(everything(worker), before)
            worker.fail(None)
            np.testing.assert_array_equal(worker.finish_with(vector.copy()), 2 * vector)
            assert any((value != before[key]).any() for key, value in worker.low_rank().items())

    on_workers(work)
