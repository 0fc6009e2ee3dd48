"""Parameter groups of the config: which parameters they choose, and how these are updated."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from support.twins import RANDOM, KerasSide, TorchSide, keras, torch

from hvdtrain.backends.optimizers import ParameterGroups
from hvdtrain.backends.tensorflow.steps import optimizers as of_keras
from hvdtrain.backends.torch.state.tensors import fill_slots
from hvdtrain.backends.torch.steps import optimizers as of_torch
from hvdtrain.config import Config, Layer
from hvdtrain.config.layers import resolve
from hvdtrain.errors import ConfigError

TASK = SimpleNamespace()
SHAPES = {
    "model/encoder/0/kernel": (4, 4),
    "model/encoder/0/bias": (4,),
    "model/encoder/norm/gamma": (4,),
    "model/head/kernel": (4, 2),
    "model/head/bias": (2,),
}


def groups_of(groups, shapes=SHAPES, **fields):
    given = {"framework": "torch", "weight_decay": 0.1, "parameter_groups": groups, **fields}
    return ParameterGroups(resolve([Layer("run.yaml", given)]), shapes)


def test_the_first_match_counts_and_the_rest_has_the_options_of_the_config():
    found = groups_of(
        [
            {"match": "model/encoder/*/bias", "weight_decay": 0.0},
            {"match": "model/encoder/*", "learning_rate_factor": 0.1},
            {"match": "*/head/bias", "frozen": True},
        ]
    )
    options = {name: (each.factor, each.weight_decay) for name, each in found.options.items()}
    assert options == {
        "model/encoder/0/kernel": (0.1, 0.1),
        "model/encoder/0/bias": (1.0, 0.0),
        "model/encoder/norm/gamma": (0.1, 0.1),
        "model/head/kernel": (1.0, 0.1),
    }
    assert found.frozen == {"model/head/bias"}
    assert found.lines == [
        "model/encoder/*/bias (1): weight decay 0",
        "model/encoder/* (2): learning rate x 0.1",
        "*/head/bias (1): frozen",
    ]


def test_norms_and_biases_can_be_left_out_of_the_decay_but_for_those_of_a_group():
    found = groups_of([{"match": "*/head/*", "weight_decay": 0.5}], decay_norms_and_biases=False)
    assert [each.weight_decay for each in found.options.values()] == [0.1, 0.0, 0.0, 0.5, 0.5]
    assert found.lines == ["*/head/* (2): weight decay 0.5", "norms and biases (2): weight decay 0"]


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        (
            [{"match": "encoder*", "frozen": True}],
            r"the pattern 'encoder\*' matches no parameter that is trained\nThere are, for example, model/",
        ),
        (
            [{"match": "*"}, {"match": "*/head/*", "frozen": True}],
            r"'\*/head/\*' matches only parameters that an earlier pattern has: model/head/kernel, ",
        ),
        (
            [{"match": "*", "lr": 1}],
            r"parameter_groups.0.lr: Extra inputs are not permitted, found 1 \(run.yaml",
        ),
        ([{"learning_rate_factor": 1}], "parameter_groups.0.match: Field required"),
        (
            [{"match": "*", "learning_rate_factor": 0}],
            "learning_rate_factor: .*greater than 0",
        ),
    ],
)
def test_a_group_that_cannot_be_is_refused(groups, said):
    with pytest.raises(ConfigError, match=said):
        groups_of(groups)


class TorchNet(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(4, 8)
        self.norm = torch.nn.LayerNorm(8)
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = torch.nn.Linear(8, 3)


class KerasNet(keras.Model):
    """Its twin."""

    def __init__(self):
        super().__init__()
        self.first = keras.layers.Dense(8)
        self.norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(2, 4)
        self.head = keras.layers.Dense(3)
        x = self.norm(self.first(np.zeros((1, 2, 4), np.float32)))
        self.head(self.attention(x, x))
        self.built = True


GROUPS = (
    {"match": "*/attention/*", "learning_rate_factor": 0.25, "weight_decay": 0.3},
    {"match": "*/head/bias", "frozen": True},
    {"match": "*/head/*", "learning_rate_factor": 2},
)


def torch_updated(config, weights, gradients, rate):
    """Give the weights after steps with these gradients, by portable name."""
    module = TorchNet()
    model = TorchSide(module).state.model
    fields = list(model.trainable_fields())
    groups = ParameterGroups(config, {field.name: field.shape for field in fields})
    model.freeze(groups.frozen)
    optimizer = of_torch.choose_optimizer(TASK, config, model, groups.options)
    fill_slots(optimizer)
    for field in fields:
        field.write(weights)
    for gradient in gradients:
        for parameter in module.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        for field in fields:
            if field.name not in groups.frozen:
                replace(field, tensors=tuple(t.grad for t in field.tensors)).write(gradient)
        for group in optimizer.param_groups:
            group["lr"] = rate * group.get("lr_scale", 1.0)
        optimizer.step()
    slots = {id(tensor) for tensor in optimizer.state}
    frozen = [t for field in fields if field.name in groups.frozen for t in field.tensors]
    assert not slots & {id(tensor) for tensor in frozen}
    return {field.name: field.read() for field in fields}


def keras_updated(config, weights, gradients, rate):
    """Do the same."""
    model = KerasSide(KerasNet()).state.model
    fields = list(model.trainable_fields())
    groups = ParameterGroups(config, {field.name: field.shape for field in fields})
    model.freeze(groups.frozen)
    optimizer = of_keras.choose_optimizer(TASK, config, model, groups.options)
    trained = list(model.trainable_fields())
    variables = [field.variable for field in trained]
    optimizer.build(variables)
    for field in fields:
        field.write(weights)
    for gradient in gradients:
        optimizer.learning_rate.assign(rate)
        arrays = [gradient[field.name].reshape(field.variable.shape) for field in trained]
        optimizer.apply([keras.ops.convert_to_tensor(array) for array in arrays], variables)
    return {field.name: field.read() for field in fields}


def reference_sgd(config, groups, weights, gradients, rate):
    expected = {name: value.astype(np.float64) for name, value in weights.items()}
    for name, own in groups.options.items():
        v = 0.0
        for gradient in gradients:
            v = config.momentum * v + gradient[name] + own.weight_decay * expected[name]
            expected[name] = expected[name] - rate * own.factor * v
    return expected


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars", "lamb"])
def test_both_frameworks_update_groups_alike(optimizer):
    config = Config(
        framework="torch", optimizer=optimizer, weight_decay=0.05, parameter_groups=GROUPS,
        decay_norms_and_biases=False,
    )  # fmt: skip
    fields = list(TorchSide(TorchNet()).state.model.trainable_fields())
    weights, *gradients = (
        {field.name: RANDOM.standard_normal(field.shape).astype(np.float32) for field in fields}
        for _ in range(4)
    )
    ours, theirs = (updated(config, weights, gradients, 0.1) for updated in (torch_updated, keras_updated))
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        np.testing.assert_allclose(theirs[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
        assert (value == weights[name]).all() == (name == "model/head/bias")
    if optimizer == "sgd":
        groups = ParameterGroups(config, {field.name: field.shape for field in fields})
        for name, value in reference_sgd(config, groups, weights, gradients, 0.1).items():
            np.testing.assert_allclose(ours[name], value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("group", [{"frozen": True}, {"learning_rate_factor": 0.5}])
def test_parts_of_one_tensor_have_the_same_options(group):
    """PyTorch has the projections of attention in one tensor."""
    config = Config(framework="torch", parameter_groups=[{"match": "*/attention/query/kernel", **group}])
    model = TorchSide(TorchNet()).state.model
    groups = ParameterGroups(config, {field.name: field.shape for field in model.trainable_fields()})

    def use():
        model.freeze(groups.frozen)
        of_torch.choose_optimizer(TASK, config, model, groups.options)

    with pytest.raises(
        ConfigError, match=r"query/kernel and model/attention/key/kernel.* parts of one tensor"
    ):
        use()
