"""Blocks of models: those of Keras models compute what these do."""

from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

from hvdtrain.backends.pipeline.checks import blocks_of
from hvdtrain.backends.tensorflow.functions import phase_of_layers
from hvdtrain.backends.tensorflow.steps.stage_passes import StageModel, layers_of
from hvdtrain.errors import TaskError
from hvdtrain.models import bert, convnet, gpt, mlp, resnet

LAYERS = {
    "dropout": lambda: keras.layers.Dropout(0.5),
    "noise": lambda: keras.layers.GaussianNoise(1.0),
    "spectral": lambda: keras.layers.SpectralNormalization(keras.layers.Dense(8)),
    "batch norm": keras.layers.BatchNormalization,
}


def sequential(layer):
    return keras.Sequential([keras.Input((8,)), keras.layers.Dense(8), layer, keras.layers.Dense(3)])


@pytest.mark.parametrize("name", LAYERS)
def test_layers_of_a_sequential_model_train_and_evaluate(name):
    whole = sequential(LAYERS[name]())
    stage = StageModel(layers_of(whole))
    inputs = tf.constant(np.random.RandomState(0).rand(16, 8), tf.float32)
    evaluated = evaluate_both(stage, whole, inputs)
    before = [np.array(variable.numpy()) for variable in whole.variables]
    with phase_of_layers(training=True):
        trained = stage.call(inputs).numpy()
    moved = any((v.numpy() != old).any() for v, old in zip(whole.variables, before, strict=True))
    assert moved or np.abs(trained - evaluated).max() > 0.1


@pytest.mark.parametrize(
    ("module", "sizes"),
    [
        (mlp, ((8, 8, 1), 10)),
        (convnet, ((8, 8, 1), 10)),
        (resnet, ((32, 32, 3), 10, 18, "imagenet")),
        (gpt, (17, 16, 2, 2, 16)),
        (bert, (17, 16, 2, 2, 16, 10)),
    ],
)
def test_blocks_of_the_built_in_models_of_keras_compute_what_they_do(module, sizes):
    model = module.tf_model(*sizes)
    blocks = module.tf_blocks(model)
    shape, random = model.inputs[0].shape[1:], np.random.RandomState(0)
    inputs = random.randint(0, 17, (4, 16)) if shape == (None,) else random.rand(4, *shape)
    evaluate_both(StageModel(blocks), model, tf.constant(inputs, model.inputs[0].dtype))
    assert {id(v) for v in model.variables} == {id(v) for v in StageModel(blocks).variables}
    assert len(blocks) > 2


def evaluate_both(stage, whole, inputs):
    expected = whole(inputs, training=False).numpy()
    with phase_of_layers(training=False):
        np.testing.assert_array_equal(stage.call(inputs), expected)
    return expected


def test_a_functional_model_without_blocks_is_refused_with_the_remedy():
    model = convnet.tf_model((8, 8, 1), 10)
    with pytest.raises(TaskError, match=r"a Functional, cannot be divided into stages"):
        blocks_of(SimpleNamespace(), model, "tf", layers_of(model))
