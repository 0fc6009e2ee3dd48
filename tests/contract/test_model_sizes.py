"""Models of published sizes: their counts of parameters, and one step of each."""

import gc

import numpy as np
import pytest
from support.twins import keras, torch

from hvdtrain.models import bert, gpt, mlp, resnet

IMAGENET = {"image_shape": (224, 224, 3), "classes": 1000, "stem": "imagenet"}
GPT2_SMALL = {"vocabulary": 50257, "context": 1024, "layers": 12, "heads": 12, "channels": 768}
BERT_BASE = {"vocabulary": 30522, "context": 512, "layers": 12, "heads": 12, "channels": 768}
BERT = 109_482_240 - 2 * 768  # with its pooler, without its token types

COUNTS = [
    (mlp, {"input_shape": (28, 28, 1), "classes": 10}, 269_322),
    (resnet, IMAGENET | {"depth": 18}, 11_689_512),
    (resnet, IMAGENET | {"depth": 34}, 21_797_672),
    (resnet, IMAGENET | {"depth": 50}, 25_557_032),
    (gpt, GPT2_SMALL, 124_439_808),
    (bert, BERT_BASE | {"classes": 2}, BERT + 2 * 768 + 2),
    (bert, BERT_BASE, BERT + 2 * 768 + 30522),
]


@pytest.mark.parametrize(("module", "arguments", "count"), COUNTS)
def test_parameters_are_as_many_as_published(module, arguments, count):
    with torch.device("meta"):
        model = module.torch_model(**arguments)
    assert sum(parameter.numel() for parameter in model.parameters()) == count


IMAGE = np.random.RandomState(0).standard_normal((1, 64, 64, 3)).astype(np.float32)
TEXT = np.arange(1, 9)[None]
STEPS = [
    (resnet, IMAGENET | {"depth": 50, "image_shape": (64, 64, 3)}, IMAGE, [3], 25_557_032),
    (gpt, GPT2_SMALL, TEXT, TEXT, 124_439_808),
    (bert, BERT_BASE | {"dropout": 0.0}, TEXT, TEXT, BERT + 2 * 768 + 30522),
]
steps = pytest.mark.parametrize(
    ("module", "arguments", "inputs", "targets", "count"), STEPS, ids=["resnet50", "gpt2-small", "bert-base"]
)
RATE = 0.01


@pytest.fixture(autouse=True)
def _memory():
    """Give a model's memory back before the next one is made."""
    yield
    keras.utils.clear_session()
    gc.collect()


@steps
def test_a_step_of_the_keras_model_runs(module, arguments, inputs, targets, count):
    import tensorflow as tf

    model = module.tf_model(**arguments)
    variables = model.trainable_variables
    assert sum(int(np.prod(variable.shape)) for variable in variables) == count
    optimizer = keras.optimizers.SGD(RATE)

    def loss():
        logits = model(inputs, training=True)
        return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, logits))

    with tf.GradientTape() as tape:
        before = loss()
    optimizer.apply_gradients(zip(tape.gradient(before, variables), variables, strict=True))
    assert loss() < before
