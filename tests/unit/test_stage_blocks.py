"""The blocks into which Keras models are divided compute as the model does, in training and in evaluation."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.stage_model import StageModel, blocks_of

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
