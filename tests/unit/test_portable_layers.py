"""Every layer type of the portable state: a torch module and its Keras twin, moved in both directions."""

from types import SimpleNamespace

import numpy as np
import pytest
from support.twins import RANDOM, Joint, check, keras, pair, torch

nn, layers = torch.nn, keras.layers
SIZES = (9, 8, 7)


def inputs(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def channels_last(module):
    """Call a module that has channels first with channels last."""
    return lambda x: module(x.movedim(-1, 1)).movedim(1, -1)


def agree(module, layer, given, shapes, call=None):
    """Check that a module and its twin have one state, with arrays of these shapes among others."""
    left, right = pair(module, layer, given, call)
    check(left, right, given)
    for side in (left, right):
        found = {name.removeprefix("model/layer/"): value.shape for name, value in side.read().items()}
        assert {name: found.get(name) for name in shapes} == shapes


def convolution(dimensions, module, layer, kernel, bias):
    x = inputs(2, *SIZES[:dimensions], 4)
    expected = {"kernel": (*[3] * dimensions, *kernel), "bias": (module.out_channels,) if bias else None}
    agree(module, layer, [x], expected, channels_last(module))


def test_dense_and_embedding():
    for bias in (True, False):
        expected = {"kernel": (5, 3), "bias": (3,) if bias else None}
        agree(nn.Linear(5, 3, bias=bias), layers.Dense(3, use_bias=bias), [inputs(4, 5)], expected)
    x = RANDOM.randint(0, 7, (3, 4))
    agree(nn.Embedding(7, 5), layers.Embedding(7, 5), [x], {"embeddings": (7, 5)})


@pytest.mark.parametrize(("dimensions", "stride", "groups"), [(1, 1, 1), (2, 2, 2), (3, 2, 1)])
@pytest.mark.parametrize("kind", ["", "Transpose"])
def test_convolutions(kind, dimensions, stride, groups):
    groups, bias = 1 if kind else groups, dimensions < 3  # Keras has no transposed ones with groups
    options = {"groups": groups} if groups > 1 else {}
    module = getattr(nn, f"Conv{kind}{dimensions}d")(4, 6, 3, stride=stride, bias=bias, **options)
    layer = getattr(layers, f"Conv{dimensions}D{kind}")(6, 3, strides=stride, use_bias=bias, **options)
    convolution(dimensions, module, layer, (6, 4) if kind else (4 // groups, 6), bias)


@pytest.mark.parametrize(
    ("dimensions", "stride", "multiplier", "bias", "by_groups"),
    [(1, 1, 1, True, False), (2, 2, 3, False, False), (2, 1, 2, True, True), (3, 1, 1, True, True)],
)
def test_depthwise_convolutions(dimensions, stride, multiplier, bias, by_groups):
    module = getattr(nn, f"Conv{dimensions}d")(4, 4 * multiplier, 3, stride=stride, groups=4, bias=bias)
    options = {"strides": stride, "use_bias": bias}
    if by_groups:
        layer = getattr(layers, f"Conv{dimensions}D")(4 * multiplier, 3, groups=4, **options)
    else:
        layer = getattr(layers, f"DepthwiseConv{dimensions}D")(3, depth_multiplier=multiplier, **options)
    convolution(dimensions, module, layer, (4, multiplier), bias)


@pytest.mark.parametrize(("dimensions", "affine"), [(1, True), (2, False)])
def test_batch_norm(dimensions, affine):
    module = getattr(nn, f"BatchNorm{dimensions}d")(4, eps=1e-3, affine=affine)
    layer = layers.BatchNormalization(epsilon=1e-3, center=affine, scale=affine)
    own = (4,) if affine else None
    expected = {"moving_mean": (4,), "moving_variance": (4,), "gamma": own, "beta": own}
    agree(module, layer, [inputs(2, *SIZES[:dimensions], 4)], expected, channels_last(module))


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (nn.LayerNorm(6, eps=1e-3), layers.LayerNormalization(epsilon=1e-3)),
        (nn.LayerNorm(6, eps=1e-3, bias=False), layers.LayerNormalization(epsilon=1e-3, center=False)),
        (nn.LayerNorm([5, 6], eps=1e-3), layers.LayerNormalization(axis=[1, 2], epsilon=1e-3)),
        (nn.RMSNorm(6, eps=1e-6), layers.RMSNormalization(epsilon=1e-6)),
    ],
)
def test_norms_that_keep_nothing(module, layer):
    agree(module, layer, [inputs(3, 5, 6)], {"gamma": tuple(module.weight.shape)})
    module, layer = nn.GroupNorm(2, 6, eps=1e-3), layers.GroupNormalization(2, epsilon=1e-3)
    agree(module, layer, [inputs(3, 5, 5, 6)], {"gamma": (6,)}, channels_last(module))


def keras_layer(kind, **options):
    return getattr(layers, "SimpleRNN" if kind == "RNN" else kind)(5, return_sequences=True, **options)


@pytest.mark.parametrize(("kind", "gates", "bias"), [("LSTM", 4, True), ("GRU", 3, True), ("RNN", 1, False)])
def test_recurrent_layers(kind, gates, bias):
    module = getattr(nn, kind)(4, 5, batch_first=True, bias=bias)
    expected = {"kernel": (4, 5 * gates), "recurrent_kernel": (5, 5 * gates)}
    expected["bias"] = ((2, 15) if kind == "GRU" else (5 * gates,)) if bias else None
    agree(module, keras_layer(kind, use_bias=bias), [inputs(2, 6, 4)], expected)


class Stack(layers.Layer):
    """Recurrent layers one over the other, held in a list."""

    def __init__(self, *stacked):
        super().__init__()
        self.layer = list(stacked)

    def call(self, x):
        for layer in self.layer:
            x = layer(x)
        return x


@pytest.mark.parametrize(("kind", "gates", "both"), [("LSTM", 4, True), ("GRU", 3, False)])
def test_stacked_and_bidirectional_recurrent_layers(kind, gates, both):
    stacked = [keras_layer(kind) for _ in range(2)]
    if both:
        stacked = [layers.Bidirectional(layer) for layer in stacked]
    holder = nn.Module()
    holder.layer = module = getattr(nn, kind)(4, 5, num_layers=2, batch_first=True, bidirectional=both)
    place = "backward_layer/" if both else ""
    expected = {f"layer/1/{place}kernel": (10 if both else 5, 5 * gates)}
    agree(holder, Stack(*stacked), [inputs(2, 6, 4)], expected, lambda x: module(x)[0])


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_cells(kind):
    x, h = inputs(2, 4), inputs(2, 5)
    states = [h, h] if kind == "LSTM" else [h]
    module, cell = getattr(nn, f"{kind}Cell")(4, 5), getattr(layers, f"{kind}Cell")(5)

    class Cell(Joint):
        def call(self, inputs):
            x, *states = inputs
            return self.layer(x, states)[0]

    holder, given = nn.Module(), Cell()
    holder.layer, given.layer = module, cell
    agree(holder, given, [x, *states], {}, lambda x, *s: module(x, s if kind == "LSTM" else s[0]))


@pytest.mark.parametrize(("value", "key", "bias"), [(8, 8, True), (6, 10, False)])
def test_attention(value, key, bias):
    given = [inputs(2, 5, 8), inputs(2, 7, value), inputs(2, 7, key)]
    module = nn.MultiheadAttention(8, 2, batch_first=True, kdim=key, vdim=value, bias=bias)
    expected = {"query/kernel": (8, 2, 4), "key/kernel": (key, 2, 4), "attention_output/kernel": (2, 4, 8)}
    expected["value/bias"] = (2, 4) if bias else None
    layer = layers.MultiHeadAttention(2, 4, use_bias=bias)
    agree(module, layer, given, expected, lambda q, v, k: module(q, k, v))


def test_a_frozen_cell_of_an_rnn_is_frozen_after_a_resume():
    from hvdtrain.backends.portable.names import Renaming
    from hvdtrain.backends.tensorflow.replica_state import TrainedSet
    from hvdtrain.backends.tensorflow.state.model_state import ModelState

    def made():
        parts = [layers.SimpleRNN(4, name="rnn"), layers.Dense(1, name="dense")]
        model = keras.Sequential([keras.Input((3, 2)), *parts])
        return parts[0].cell, TrainedSet(model, ModelState(model, Renaming(SimpleNamespace(), "tf")))

    (cell, trained), (resumed, follows) = made(), made()
    cell.trainable = False  # the RNN, which has the same name, stays as it was
    trained.accept()
    follows.follow(trained.state(optimized=()))
    assert not resumed.trainable
