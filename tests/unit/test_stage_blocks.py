"""Blocks of models: what Keras models are divided into computes as they do; models without memory."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf
import torch

from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.stages import model as tf_stages
from hvdtrain.backends.tensorflow.stages.model import StageModel, blocks_of
from hvdtrain.backends.torch.stages import model as torch_stages

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


def test_a_value_that_a_keras_model_is_given_while_it_has_no_memory_is_known():
    with tf_stages.parameters_without_memory() as are_changed:
        model = sequential(LAYERS["batch norm"]())
        assert not are_changed()
        model.layers[1].moving_mean.assign(np.ones(8))
    assert are_changed()


def test_a_model_of_pytorch_is_made_without_memory():
    with torch_stages.parameters_without_memory():
        model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 4))
    assert all(parameter.is_meta for parameter in model.parameters())
    torch_stages.give_memory(list(model)[:1], torch.device("cpu"))
    assert [p.is_meta for p in model.parameters()] == [False] * 2 + [True] * 4
    assert model[1].running_var.tolist() == [1, 1, 1]
