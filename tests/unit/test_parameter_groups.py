"""Parameter groups: what they choose; all optimizers, in groups, against their formulas in numpy."""

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from support.twins import RANDOM, KerasSide, TorchSide, keras, optimizer_part, torch

from hvdtrain.backends.optimizers import ParameterGroups
from hvdtrain.backends.options import is_matrix
from hvdtrain.backends.tensorflow.steps import optimizers as of_keras
from hvdtrain.backends.torch.state.tensors import fill_slots
from hvdtrain.backends.torch.steps import optimizers as of_torch
from hvdtrain.config import Config, Layer
from hvdtrain.config.layers import resolve
from hvdtrain.errors import ConfigError

nn, layers = torch.nn, keras.layers
SHAPES = {
    "model/encoder/0/kernel": (4, 4),
    "model/encoder/0/bias": (4,),
    "model/encoder/norm/gamma": (4,),
    "model/head/kernel": (4, 2),
    "model/head/bias": (2,),
}


def groups_of(groups, **fields):
    given = {"framework": "torch", "weight_decay": 0.1, "parameter_groups": groups, **fields}
    return ParameterGroups(resolve([Layer("run.yaml", given)]), SHAPES)


def test_the_first_match_counts_and_the_rest_has_the_options_of_the_config():
    groups = [
        {"match": "model/encoder/*/bias", "weight_decay": 0.0},
        {"match": "model/encoder/*", "learning_rate_factor": 0.1},
        {"match": "*/head/bias", "frozen": True},
    ]
    found = groups_of(groups)
    options = {name: (each.factor, each.weight_decay) for name, each in found.options.items()}
    assert options == {
        "model/encoder/0/kernel": (0.1, 0.1),
        "model/encoder/0/bias": (1.0, 0.0),
        "model/encoder/norm/gamma": (0.1, 0.1),
        "model/head/kernel": (1.0, 0.1),
    }
    assert found.frozen == {"model/head/bias"}
    assert found.lines[1:] == ["model/encoder/* (2): learning rate x 0.1", "*/head/bias (1): frozen"]


def test_norms_and_biases_can_be_left_out_of_the_decay_but_for_those_of_a_group():
    found = groups_of([{"match": "*/head/*", "weight_decay": 0.5}], decay_norms_and_biases=False)
    assert [each.weight_decay for each in found.options.values()] == [0.1, 0.0, 0.0, 0.5, 0.5]
    assert found.lines == ["*/head/* (2): weight decay 0.5", "norms and biases (2): weight decay 0"]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ([{"match": "encoder*", "frozen": True}], r"matches no parameter that is trained\nThere are, for ex"),
        ([{"match": "*"}, {"match": "*/head/*", "frozen": True}], "only parameters that an earlier pattern"),
        ([{"match": "*", "lr": 1}], r"parameter_groups.0.lr: Extra inputs .*\(run.yaml"),
    ],
)
def test_a_group_that_cannot_be_is_refused(groups, said):
    with pytest.raises(ConfigError, match=said):
        groups_of(groups)


def torch_net():
    """Give several parameters in one tensor (attention), biases of two dimensions, norms."""
    parts = {"attention": nn.MultiheadAttention(8, 2), "gru": nn.GRU(8, 4), "norm": nn.LayerNorm(4)}
    return nn.ModuleDict({**parts, "dense": nn.Linear(4, 3)})


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


GROUPS = (
    {"match": "*/attention/*", "learning_rate_factor": 0.25, "weight_decay": 0.3},
    {"match": "*/gru/*", "weight_decay": 0.0},
    {"match": "*/dense/bias", "frozen": True},
    {"match": "*/dense/*", "learning_rate_factor": 2},
)
RATES = (0.5, 0.5, 0.1, 0.2)  # v is not rescaled when the rate changes
near = partial(np.testing.assert_allclose, rtol=5e-6, atol=5e-6)


def torch_side(config):
    net = torch_net()
    groups, optimizer = chosen(TorchSide(net), config, of_torch)
    fill_slots(optimizer)
    return TorchSide(net, optimizer), groups


def keras_side(config):
    net = KerasNet()
    groups, optimizer = chosen(KerasSide(net), config, of_keras)
    return KerasSide(net, optimizer), groups


def chosen(side, config, module):
    model = side.state.model
    groups = ParameterGroups(config, {field.name: field.shape for field in model.trainable_fields()})
    model.freeze(groups.frozen)
    return groups, module.choose_optimizer(SimpleNamespace(), config, model, groups.options)


def torch_step(side, gradients, rate):
    for parameter in side.module.parameters():
        parameter.grad = torch.full_like(parameter, np.nan) if parameter.requires_grad else None
    for field in side.state.model.trainable_fields():
        grads = tuple(tensor.grad for tensor in field.tensors)
        replace(field, tensors=grads).write({field.name: gradients[field.name]})
    for group in side.optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    side.optimizer.step()


def keras_step(side, gradients, rate):
    by_variable = {id(field.variable): field for field in side.state.model.trainable_fields()}
    variables = side.model.trainable_variables
    ordered = [gradients[by_variable[id(v)].name].reshape(v.shape) for v in variables]
    side.optimizer.learning_rate.assign(rate)
    side.optimizer.apply([keras.ops.convert_to_tensor(g) for g in ordered], variables)


def lars(config, decay, values, state, adapted):
    w, g = values
    if adapted:
        norms = np.linalg.norm(w), np.linalg.norm(g)
        factor = 0.001 * norms[0] / (norms[1] + decay * norms[0] + 1e-8)
        g = (g + decay * w) * (factor if all(norms) else 1)
    state["v"] = config.momentum * state.get("v", 0) + g
    return state["v"]


def lamb(config, decay, values, state, adapted, *, in_norm=True):
    w, g = values
    state["t"] = state.get("t", 0) + 1
    beta1, beta2 = config.adam_beta1, config.adam_beta2
    state["m"] = beta1 * state.get("m", 0) + (1 - beta1) * g
    state["v"] = beta2 * state.get("v", 0) + (1 - beta2) * g**2
    first, second = state["m"] / (1 - beta1 ** state["t"]), state["v"] / (1 - beta2 ** state["t"])
    update = first / (np.sqrt(second) + config.adam_epsilon)
    if not in_norm:
        return update + decay * w
    if adapted:
        update = update + decay * w
        norms = np.linalg.norm(w), np.linalg.norm(update)
        update = update * (norms[0] / norms[1] if all(norms) else 1)
    return update


def sgd(config, decay, values, state, adapted):
    w, g = values
    state["v"] = config.momentum * state.get("v", 0) + g + decay * w
    return state["v"]


MOMENTS = {"first_moment": "m", "second_moment": "v"}
SIDES = {"torch": (torch_side, torch_step), "tf": (keras_side, keras_step)}
REFERENCES = {
    "sgd": (sgd, {"momentum": "v"}),
    "adamw": (partial(lamb, in_norm=False), MOMENTS),
    "lars": (lars, {"momentum": "v"}),
    "lamb": (lamb, MOMENTS),
}


@pytest.mark.parametrize("optimizer", REFERENCES)
@pytest.mark.parametrize("framework", SIDES)
def test_weights_and_slots_of_groups_follow_the_formula(framework, optimizer):
    values = {"weight_decay": 0.1, "adam_epsilon": 1e-6, "momentum": 0.8, "adam_beta2": 0.95}
    config = Config(framework=framework, optimizer=optimizer, parameter_groups=GROUPS, **values)
    make, step = SIDES[framework]
    side, groups = make(config)
    shapes = {name: a.shape for name, a in side.read().items() if name.startswith("model/")}
    weights, *gradients = (
        {name: RANDOM.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
        for _ in range(1 + len(RATES))
    )
    weights["model/attention/query/kernel"][:] = 0
    gradients[1]["model/attention/key/kernel"][:] = 0
    side.write({**weights, **optimizer_part(side.read())})
    expected = {name: value.astype(np.float64) for name, value in weights.items()}
    states = {name: {} for name in groups.options}
    formula, slots = REFERENCES[optimizer]
    for rate, gradient in zip(RATES, gradients, strict=True):
        step(side, gradient, rate)
        for name, own in groups.options.items():
            values = expected[name], gradient[name].astype(np.float64)
            is_adapted = is_matrix(name, values[0].shape)
            update = formula(config, own.weight_decay, values, states[name], is_adapted)
            expected[name] = values[0] - rate * own.factor * update
    found = side.read()
    assert groups.frozen == {"model/dense/bias"}
    assert not any(name.startswith("optimizer/") and name.endswith("dense/bias") for name in found)
    for name, w in expected.items():
        near(found[name], w, err_msg=name)
        for slot, key in slots.items() if name in states else ():
            near(found[f"optimizer/{slot}/{name.removeprefix('model/')}"], states[name][key], err_msg=name)


def test_biases_norms_and_vectors_are_not_adapted_to():
    shapes = {"dense/kernel": (3, 4), "position": (8, 4), "attention/query/bias": (2, 4), "gamma": (4, 4)}
    found = [path for path, shape in {**shapes, "temperature": ()}.items() if is_matrix(path, shape)]
    assert found == ["dense/kernel", "position"]


@pytest.mark.parametrize("group", [{"frozen": True}, {"learning_rate_factor": 0.5}])
def test_parts_of_one_tensor_have_the_same_options(group):
    """PyTorch has the projections of attention in one tensor."""
    config = Config(framework="torch", parameter_groups=[{"match": "*/attention/query/kernel", **group}])
    with pytest.raises(ConfigError, match=r"query/kernel and model/attention/key/.* parts of one tensor"):
        chosen(TorchSide(torch_net()), config, of_torch)
