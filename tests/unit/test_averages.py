"""The moving average of weights: its decay, its place in the portable state, and both frameworks' part."""

from contextlib import suppress

import numpy as np
import pytest
from support.twins import KerasHolder, KerasSide, TorchHolder, TorchSide, assert_same, keras, torch

from hvdtrain.backends.portable.initial_values import has_ema, without_ema
from hvdtrain.backends.tensorflow.state import moving_state as keras_ema
from hvdtrain.backends.torch.state import moving_state as torch_ema
from hvdtrain.errors import TaskError

X = np.zeros((1, 4, 3), np.float32)


def torch_side(decay):
    """Give a model with two biases that act as their sum, whose tensors the portable state cannot tell."""
    module = TorchHolder(torch.nn.Sequential(torch.nn.LSTM(3, 2), torch.nn.BatchNorm1d(2)))
    side = TorchSide(module)
    averages = torch_ema.ExponentialMovingAverage(side.state.model, decay)
    side.state = type(side.state)(side.state.model, side.optimizer, averages)
    return side


def keras_side(decay):
    model = KerasHolder(keras.Sequential([keras.layers.LSTM(2, name="0"), keras.layers.BatchNormalization()]))
    model.layer.layers[1].name = "1"
    model(X)
    side = KerasSide(model)
    averages = keras_ema.ExponentialMovingAverage(side.state.model, decay)
    side.state = type(side.state)(side.state.model, side.optimizer, averages)
    return side


SIDES = {"torch": torch_side, "tf": keras_side}


@pytest.fixture(params=SIDES)
def side(request):
    """A model with random weights, whose average started from others."""
    made = SIDES[request.param](0.9)
    averages = {name: a for name, a in made.read().items() if "ema/" in name}
    made.randomize()
    made.write(made.read() | averages)
    return made


def weights_of(state, prefix="model/"):
    return {name.removeprefix(prefix): a for name, a in state.items() if name.startswith(prefix)}


def test_the_model_has_the_averages_for_a_while_also_where_that_fails(side):
    before = side.read()
    with suppress(KeyError), side.state.ema.in_model():
        during = side.read()
        raise KeyError
    assert_same(side.read(), before)
    expected = {**weights_of(before), **weights_of(before, "ema/")}
    assert_same(weights_of(during), expected)


def test_a_state_without_averages_starts_them_from_its_weights(side):
    state = without_ema(side.read())
    side.write(state)
    assert_same(without_ema(side.read()), state)
    weights = weights_of(state)
    assert_same(weights_of(side.read(), "ema/"), {n: weights[n] for n in weights_of(side.read(), "ema/")})


@pytest.mark.parametrize("framework", SIDES)
def test_a_model_without_averages_refuses_them_and_leaves_the_weights_alone(framework):
    plain = SIDES[framework](None)
    assert not has_ema(plain.read())
    plain.state.ema.update(plain.state.ema.share(1))
    plain.state.ema.restart()
    before = plain.read()
    with plain.state.ema.in_model():
        assert_same(plain.read(), before)
    with pytest.raises(TaskError, match="unexpected: ema/"):
        plain.write(SIDES[framework](0.9).read())
