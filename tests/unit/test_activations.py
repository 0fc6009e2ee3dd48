"""What a micro-batch takes of memory: known sizes, in both frameworks, and what a graph really takes."""

import keras
import pytest
import tensorflow as tf
import torch
from torch.utils.checkpoint import checkpoint

from hvdtrain.backends.tensorflow.activations import ActivationMeter as TensorFlowMeter
from hvdtrain.backends.tensorflow.activations import Operation, most_bytes
from hvdtrain.backends.torch.activations import ActivationMeter as TorchMeter

INPUTS, WIDTH = 64, 1024


def torch_model():
    layers = (
        torch.nn.Linear(INPUTS, WIDTH, bias=False),
        torch.nn.ReLU(),
        torch.nn.Linear(WIDTH, 1, bias=False),
    )
    return torch.nn.Sequential(*layers)


def torch_bytes(samples, forward=None, model=None):
    model = model or torch_model()
    x = torch.ones(samples, INPUTS)
    with (meter := TorchMeter(model, [x])):
        (forward or model)(x).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
    return meter.found().activations


@pytest.mark.parametrize("samples", [8, 64])
def test_what_a_step_of_pytorch_takes_at_once_is_known(samples):
    """Behind the ReLU: its output, its gradient, and that of its input. No gradient of a parameter counts."""
    hidden = 4 * samples * WIDTH
    assert 3 * hidden <= torch_bytes(samples) < 3.1 * hidden


def test_blocks_that_are_computed_again_take_less():
    blocks = torch.nn.Sequential(*[torch.nn.Sequential(torch_block(), torch_block()) for _ in range(8)])

    def recomputed(x):
        for block in blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    assert torch_bytes(64, recomputed, blocks) < 0.75 * torch_bytes(64, None, blocks)


def torch_block():
    return torch.nn.Sequential(torch.nn.Linear(INPUTS, INPUTS), torch.nn.Tanh())


def made(kind, inputs, **outputs):
    return Operation(kind, inputs, [(int(name[1:]), size) for name, size in outputs.items()])


def test_a_tensor_lives_from_what_makes_it_to_what_takes_it_last():
    done = [
        made("ReadVariableOp", [], t1=1000),
        made("MatMul", [0, 1], t2=100),
        made("Relu", [2], t3=100),  # the first is free after it
        made("Reshape", [3, 9], t4=100),  # the same memory
        made("Mul", [4, 4], t5=30),
        made("Print", [5], t6=500),  # nothing needs it
        made("MatMulGrad", [4, 5], t7=800),  # the result
    ]
    assert most_bytes(done, {7}) == 200
    assert most_bytes(done, {5}) == 200
    assert most_bytes(done[:2], {2}) == 0


def tensorflow_step(samples):
    x = keras.Input((INPUTS,))
    hidden = keras.layers.ReLU()(keras.layers.Dense(WIDTH, use_bias=False)(x))
    model = keras.Model(x, keras.layers.Dense(1, use_bias=False)(hidden))
    batch = tf.ones((samples, INPUTS))

    def step():
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(model(batch, training=True))
        return tape.gradient(loss, model.trainable_variables)

    return step


def tensorflow_memory(step):
    with (meter := TensorFlowMeter(is_cpu=True)):
        meter.take_gradients(step())
    return meter.found()


@pytest.mark.parametrize("samples", [8, 64])
def test_tensorflow_takes_what_pytorch_takes(samples):
    found = tensorflow_memory(tensorflow_step(samples))
    assert found.activations == pytest.approx(torch_bytes(samples), rel=0.05)
    assert found.compiling > 0
