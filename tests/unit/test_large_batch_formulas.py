"""lars and lamb in both frameworks, against their formulas in numpy with 64 bits."""

from dataclasses import replace

import numpy as np
import pytest
from support.twins import RANDOM, KerasSide, TorchSide, keras, optimizer_part, torch

from hvdtrain.backends.optimizers import ParameterOptions
from hvdtrain.backends.options import is_matrix
from hvdtrain.backends.tensorflow.steps.optimizers import choose_optimizer as keras_optimizer
from hvdtrain.backends.torch.state.tensors import fill_slots
from hvdtrain.backends.torch.steps.optimizers import choose_optimizer as torch_optimizer
from hvdtrain.config import Config

nn, layers = torch.nn, keras.layers
RATES = (0.5, 0.5, 0.1, 0.2)  # v is not rescaled when the rate changes
TOLERANCE = 2e-6


class TorchNet(nn.Module):
    """Several parameters in one tensor (attention), biases of two dimensions, norms."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2)
        self.gru = nn.GRU(8, 4)
        self.norm = nn.LayerNorm(4)
        self.dense = nn.Linear(4, 3)


class KerasNet(keras.Model):
    """Its twin."""

    def __init__(self):
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 4)
        self.gru = layers.GRU(4)
        self.norm = layers.LayerNormalization()
        self.dense = layers.Dense(3)
        x = np.zeros((1, 2, 8), np.float32)
        self.dense(self.norm(self.gru(self.attention(x, x))))
        self.built = True


def options(config, model):
    return {one.name: ParameterOptions(1.0, config.weight_decay) for one in model.trainable_fields()}


def torch_side(config):
    module = TorchNet()
    model = TorchSide(module).state.model
    side = TorchSide(module, torch_optimizer(None, config, model, options(config, model)))
    fill_slots(side.optimizer)
    side.state = type(side.state)(side.state.model, side.optimizer)
    return side


def keras_side(config):
    net = KerasNet()
    model = KerasSide(net).state.model
    return KerasSide(net, keras_optimizer(None, config, model, options(config, model)))


def torch_step(side, gradients, rate):
    for parameter in side.module.parameters():
        parameter.grad = torch.full_like(parameter, np.nan)
    for field in side.state.model.trainable_fields():
        grads = tuple(tensor.grad for tensor in field.tensors)
        replace(field, tensors=grads).write({field.name: gradients[field.name]})
    for group in side.optimizer.param_groups:
        group["lr"] = rate
    side.optimizer.step()


def keras_step(side, gradients, rate):
    by_variable = {id(field.variable): field for field in side.state.model.trainable_fields()}
    variables = side.model.trainable_variables
    ordered = [gradients[by_variable[id(v)].name].reshape(v.shape) for v in variables]
    side.optimizer.learning_rate.assign(rate)
    side.optimizer.apply([keras.ops.convert_to_tensor(g) for g in ordered], variables)


SIDES = {"torch": (torch_side, torch_step), "tf": (keras_side, keras_step)}


def lars(config, w, g, state, adapted):
    if adapted:
        norms = np.linalg.norm(w), np.linalg.norm(g)
        factor = 0.001 * norms[0] / (norms[1] + config.weight_decay * norms[0] + 1e-8)
        g = (g + config.weight_decay * w) * (factor if all(norms) else 1)
    state["v"] = config.momentum * state.get("v", 0) + g
    return state["v"]


def lamb(config, w, g, state, adapted):
    state["t"] = state.get("t", 0) + 1
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    first, second = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
    update = first / (np.sqrt(second) + config.adam_epsilon)
    if adapted:
        update = update + config.weight_decay * w
        norms = np.linalg.norm(w), np.linalg.norm(update)
        update = update * (norms[0] / norms[1] if all(norms) else 1)
    return update


REFERENCES = {"lars": lars, "lamb": lamb}
SLOTS = {"lars": {"momentum": "v"}, "lamb": {"first_moment": "m", "second_moment": "v"}}


def drawn(side):
    """Give random weights and a random gradient for each step, by portable name; one of each is 0."""
    shapes = {name: a.shape for name, a in side.read().items() if name.startswith("model/")}
    weights = {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    gradients = [
        {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in RATES
    ]
    weights["model/attention/query/kernel"][:] = 0
    gradients[1]["model/attention/key/kernel"][:] = 0
    return weights, gradients


def give_weights(side, weights):
    side.write({**weights, **optimizer_part(side.read())})


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimizer", REFERENCES)
@pytest.mark.parametrize("framework", SIDES)
def test_weights_and_slots_follow_the_formula(framework, optimizer, decay):
    options = {"weight_decay": decay, "adam_epsilon": 1e-6, "momentum": 0.8}
    config = Config(framework=framework, optimizer=optimizer, adam_beta2=0.95, **options)
    make, step = SIDES[framework]
    side = make(config)
    weights, gradients = drawn(side)
    give_weights(side, weights)
    expected = {name: value.astype(np.float64) for name, value in weights.items()}
    states = {name: {} for name in weights}
    for rate, gradient in zip(RATES, gradients, strict=True):
        step(side, gradient, rate)
        for name, w in expected.items():
            g = gradient[name].astype(np.float64)
            update = REFERENCES[optimizer](config, w, g, states[name], is_matrix(name, w.shape))
            expected[name] = w - rate * update
    found = side.read()
    for name, w in expected.items():
        np.testing.assert_allclose(found[name], w, rtol=TOLERANCE, atol=TOLERANCE, err_msg=name)
        path = name.removeprefix("model/")
        for slot, key in SLOTS[optimizer].items():
            value = found[f"optimizer/{slot}/{path}"]
            np.testing.assert_allclose(
                value, states[name][key], rtol=TOLERANCE, atol=TOLERANCE, err_msg=f"{slot} of {name}"
            )


@pytest.mark.parametrize(
    ("path", "shape", "expected"),
    [
        ("dense/kernel", (3, 4), True),
        ("token/embeddings", (10, 4), True),
        ("position", (8, 4), True),
        ("dense/bias", (4,), False),
        ("attention/query/bias", (2, 4), False),
        ("norm/gamma", (4, 4), False),
        ("norm/beta", (4,), False),
        ("temperature", (), False),
    ],
)
def test_biases_norms_and_vectors_are_not_adapted_to(path, shape, expected):
    assert is_matrix(path, shape) == expected


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "lamb"])
def test_what_a_callback_has_frozen_stays_with_the_optimizer(name):
    """Its slots are those of the checkpoint."""
    config, module = Config(framework="torch", optimizer=name), TorchNet()
    model = TorchSide(module).state.model
    module.norm.requires_grad_(False)
    optimizer = torch_optimizer(None, config, model, options(config, model))
    known = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert known == set(map(id, module.parameters()))
