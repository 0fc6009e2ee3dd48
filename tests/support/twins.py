"""A torch module and its Keras twin, side by side in one process: weights moved, outputs compared."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("tensorflow")
pytest.importorskip("horovod")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras  # noqa: E402

from hvdtrain.backends.portable.names import Renaming  # noqa: E402
from hvdtrain.backends.tensorflow.state import model_state as keras_model_state  # noqa: E402
from hvdtrain.backends.tensorflow.steps import optimizer_state as keras_optimizer_state  # noqa: E402
from hvdtrain.backends.torch.state import model_state as torch_model_state  # noqa: E402
from hvdtrain.backends.torch.steps import optimizer_state as torch_optimizer_state  # noqa: E402

RANDOM = np.random.RandomState(3)


def names_of(state_names=None):
    return SimpleNamespace(state_names=state_names or {})


class Side:
    """A model's state, which can be read, written and made random."""

    def read(self):
        return self.state.snapshot().read()

    def write(self, state):
        self.state.load(state)

    def randomize(self):
        """Set every weight to a random value, variances to a positive one."""
        state = self.read()
        for name, value in state.items():
            if name.startswith("model/") and value.dtype.kind == "f":
                drawn = RANDOM.uniform(-0.5, 0.5, value.shape).astype(value.dtype)
                state[name] = np.abs(drawn) + 0.5 if name.endswith("variance") else drawn
        self.write(state)


class TorchSide(Side):
    """A module, with an optimizer where one is given, as the torch backend holds them."""

    def __init__(self, module, optimizer=None, state_names=None):
        self.module = module
        tensors = torch_model_state.ModelState(module, Renaming(names_of(state_names), "torch"))
        parameters = list(module.parameters()) or [torch.zeros(1)]
        optimizer = optimizer or torch.optim.SGD(parameters, lr=0.1)
        self.optimizer = optimizer
        self.state = torch_optimizer_state.TrainingState(tensors, optimizer)

    def __call__(self, *inputs):
        self.module.eval()
        with torch.no_grad():
            outputs = self.module(*map(torch.from_numpy, inputs))
        return (outputs[0] if isinstance(outputs, tuple) else outputs).numpy()


class KerasSide(Side):
    """A model, with an optimizer where one is given, as the TensorFlow backend holds them."""

    def __init__(self, model, optimizer=None, state_names=None):
        self.model = model
        tensors = keras_model_state.ModelState(model, Renaming(names_of(state_names), "tf"))
        self.optimizer = optimizer or keras.optimizers.SGD()
        self.optimizer.build(model.trainable_variables)
        self.state = keras_optimizer_state.TrainingState(tensors, self.optimizer)

    def __call__(self, *inputs):
        return np.asarray(self.model(inputs[0] if len(inputs) == 1 else list(inputs), training=False))


def model_part(state):
    """Return the part of a state that both frameworks share."""
    return {name: value for name, value in state.items() if name.startswith("model/")}


def optimizer_part(state):
    return {name: value for name, value in state.items() if name.startswith("optimizer/")}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)
        assert found[name].dtype == value.dtype, name


class TorchHolder(torch.nn.Module):
    """A model with one module at the attribute ``layer``."""

    def __init__(self, layer, call=None):
        super().__init__()
        self.layer = layer
        self.own_call = call

    def forward(self, *inputs):
        return (self.own_call or self.layer)(*inputs)


class Joint(keras.layers.Layer):
    """A layer of a test that takes all its inputs as one list."""


class KerasHolder(keras.Model):
    """Its twin."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def call(self, inputs):
        several = isinstance(inputs, list) and not isinstance(self.layer, Joint)
        return self.layer(*inputs) if several else self.layer(inputs)


def pair(module, layer, inputs, call=None):
    """Return both sides of a model of one layer with random weights; ``call`` is how torch calls it."""
    model = KerasHolder(layer)
    model(inputs[0] if len(inputs) == 1 else list(inputs))
    left, right = TorchSide(TorchHolder(module, call)), KerasSide(model)
    left.randomize()
    right.randomize()
    return left, right


def check(left, right, inputs, tolerance=1e-5):
    """Move weights in both directions: equal names and values, equal outputs, nothing lost."""
    for source, target in ((left, right), (right, left)):
        source.randomize()
        state = source.read()
        target.write(model_part(state) | optimizer_part(target.read()))
        assert_same(model_part(target.read()), model_part(state))
        np.testing.assert_allclose(left(*inputs), right(*inputs), atol=tolerance, rtol=tolerance)
    for side in (left, right):
        state = side.read()
        side.randomize()
        side.write(state)
        assert_same(side.read(), state)
