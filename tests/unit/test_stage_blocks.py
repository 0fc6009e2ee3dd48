"""Blocks of models: what Keras models are divided into computes as they do; models without memory."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdtrain.backends.tensorflow import stage_model as tf_stages
from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.stage_model import StageModel, blocks_of
from hvdtrain.backends.tensorflow.staged_backend import TensorFlowStagedBackend
from hvdtrain.backends.torch import stage_model as torch_stages
from hvdtrain.backends.torch.staged_backend import TorchStagedBackend
from hvdtrain.config import Config

LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.5),
    "noise": lambda: keras.layers.GaussianNoise(1.0),
    "spectral": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(8)),
    "batch norm": keras.layers.BatchNormalization,
}


def sequential(layer):
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), layer, keras.layers.Dense(3)])


def nested(layer):
    inputs = keras.Input((8,))
    return keras.Model(inputs, keras.layers.Dense(3)(sequential(layer)(inputs)))


@pytest.mark.parametrize("model", [sequential, nested])
@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_functional_model_train_and_evaluate(model, name):
    """Keras keeps ``training=False`` with the calls of layers that have this default."""
    whole = model(LAYERS[name]())
    stage = StageModel(blocks_of(SimpleNamespace(), whole))
    inputs = tf.constant(np.random.RandomState(0).rand(16, 8), tf.float32)
    with phase_of_layers(training=False):
        np.testing.assert_allclose(stage.call(inputs), whole(inputs, training=False), rtol=1e-6)
    evaluated = whole(inputs, training=False).numpy()
    before = [np.array(variable.numpy()) for variable in whole.variables]
    with phase_of_layers(training=True):
        trained = stage.call(inputs).numpy()
    moved = any((v.numpy() != old).any() for v, old in zip(whole.variables, before, strict=True))
    assert moved or np.abs(trained - evaluated).max() > 0.1


def test_a_keras_model_is_made_without_memory_and_its_values_are_those_of_any_other():
    keras.utils.set_random_seed(3)
    expected = nested(LAYERS["dropout"]()).get_weights()
    keras.utils.set_random_seed(3)
    with tf_stages.parameters_without_memory() as are_changed:
        model = nested(LAYERS["dropout"]())
    assert not are_changed()
    nested(LAYERS["dropout"]())  # at its end Keras gives memory to what waits for it
    assert [variable._value for variable in model.variables] == [None] * len(model.variables)
    first, *others = blocks_of(SimpleNamespace(), model)
    tf_stages.give_memory([first])
    assert [variable._value is None for variable in model.weights] == [False] * 2 + [True] * 4
    tf_stages.give_memory(others)
    for found, value in zip(model.get_weights(), expected, strict=True):
        np.testing.assert_array_equal(found, value)


def test_a_value_that_a_keras_model_is_given_while_it_has_no_memory_is_known():
    with tf_stages.parameters_without_memory() as are_changed:
        model = sequential(LAYERS["batch norm"]())
        assert not are_changed()
        model.layers[1].moving_mean.assign(np.ones(8))
    assert are_changed()


@pytest.mark.parametrize("sets_a_value", [False, True])
def test_a_keras_model_that_is_made_again_has_the_names_of_one_that_is_made_once(sets_a_value):
    made = []

    def make():
        model = keras.Sequential(
            [keras.Input((8,)), keras.layers.Dense(8), keras.layers.BatchNormalization()]
        )
        if sets_a_value:
            model.layers[1].moving_mean.assign(np.full(8, 3.0))
        made.append(model)
        return model

    config = Config(framework="tf", stage_balance="memory", initial_parameters="portable")
    keras.utils.clear_session()
    backend, task = SimpleNamespace(_batch_norm=None), SimpleNamespace(tf_model=make)
    model, _, is_whole = TensorFlowStagedBackend._whole_model(backend, task, config)
    assert (is_whole, len(made)) == (sets_a_value, 1 + sets_a_value)
    assert [layer.name for layer in model.layers] == ["dense", "batch_normalization"]
    if is_whole:
        assert model.layers[1].moving_mean.numpy().tolist() == [3.0] * 8


@pytest.mark.parametrize("kind", ["plain", "hook", "attribute", "late hook", "subclass"])
def test_a_model_of_pytorch_whose_parameters_have_more_than_numbers_is_made_whole(kind):
    """What stands in the place of a parameter without memory would not have it."""

    class Own(torch.nn.Parameter):
        pass

    def make():
        layer = torch.nn.Linear(2, 3)
        if kind == "hook":
            layer.weight.register_hook(lambda gradient: gradient * 0)
        elif kind == "late hook":
            layer.bias.register_post_accumulate_grad_hook(lambda _: None)
        elif kind == "attribute":
            layer.weight.has_decay = False
        elif kind == "subclass":
            layer.weight = Own(torch.ones(3, 2))
        return torch.nn.Sequential(layer, torch.nn.Linear(3, 4))

    config = Config(framework="torch", stage_balance="memory", initial_parameters="portable")
    task = SimpleNamespace(torch_model=make)
    model, blocks, is_whole = TorchStagedBackend._whole_model(None, task, config)
    assert len(blocks) == 2
    assert is_whole == (kind not in ("plain", "subclass"))
    metas = [parameter.is_meta for parameter in model.parameters()]
    assert metas == [False if is_whole else not isinstance(p, Own) for p in model.parameters()]


def test_a_model_of_pytorch_is_made_without_memory():
    with torch_stages.parameters_without_memory():
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    assert all(parameter.is_meta for parameter in model.parameters())
    torch_stages.give_memory(list(model)[:1], torch.device("cpu"))
    assert [p.is_meta for p in model.parameters()] == [False] * 2 + [True] * 4
    assert model[1].running_var.tolist() == [1, 1, 1]
