"""Every layer type of the portable state: a torch module and its Keras twin, moved in both directions."""

import numpy as np
import pytest
from support.twins import RANDOM, Joint, TorchSide, check, keras, pair, torch

nn, layers = torch.nn, keras.layers


def inputs(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def names_and_shapes(side):
    return {
        name.removeprefix("model/layer/"): value.shape
        for name, value in side.read().items()
        if name.startswith("model/")
    }


def channels_last(module):
    """Call a module that has channels first with channels last."""

    def call(x):
        return module(x.movedim(-1, 1)).movedim(1, -1)

    return call


@pytest.mark.parametrize("bias", [True, False])
def test_linear(bias):
    x = inputs(4, 5)
    left, right = pair(nn.Linear(5, 3, bias=bias), layers.Dense(3, use_bias=bias), [x])
    check(left, right, [x])
    assert names_and_shapes(left) == {"kernel": (5, 3)} | ({"bias": (3,)} if bias else {})


SIZES = (9, 8, 7)


@pytest.mark.parametrize(
    ("dimensions", "stride", "groups", "bias"),
    [(1, 1, 1, True), (2, 2, 2, True), (2, 1, 1, True), (3, 2, 1, False)],
)
def test_convolutions(dimensions, stride, groups, bias):
    x = inputs(2, *SIZES[:dimensions], 4)
    module = getattr(nn, f"Conv{dimensions}d")(4, 6, 3, stride=stride, groups=groups, bias=bias)
    layer = getattr(layers, f"Conv{dimensions}D")(6, 3, strides=stride, groups=groups, use_bias=bias)
    left, right = pair(module, layer, [x], channels_last(module))
    check(left, right, [x])
    assert names_and_shapes(left)["kernel"] == (*[3] * dimensions, 4 // groups, 6)


@pytest.mark.parametrize(("dimensions", "stride", "bias"), [(1, 2, True), (2, 1, False), (3, 2, True)])
def test_transposed_convolutions(dimensions, stride, bias):
    x = inputs(2, *SIZES[:dimensions], 4)
    module = getattr(nn, f"ConvTranspose{dimensions}d")(4, 6, 3, stride=stride, bias=bias)
    layer = getattr(layers, f"Conv{dimensions}DTranspose")(6, 3, strides=stride, use_bias=bias)
    left, right = pair(module, layer, [x], channels_last(module))
    check(left, right, [x])
    assert names_and_shapes(left)["kernel"] == (*[3] * dimensions, 6, 4)


@pytest.mark.parametrize(("dimensions", "stride", "multiplier", "bias"), [(1, 1, 1, True), (2, 2, 3, False)])
def test_depthwise_convolutions(dimensions, stride, multiplier, bias):
    x = inputs(2, *SIZES[:dimensions], 4)
    module = getattr(nn, f"Conv{dimensions}d")(4, 4 * multiplier, 3, stride=stride, groups=4, bias=bias)
    layer = getattr(layers, f"DepthwiseConv{dimensions}D")(
        3, strides=stride, depth_multiplier=multiplier, use_bias=bias
    )
    left, right = pair(module, layer, [x], channels_last(module))
    check(left, right, [x])
    assert names_and_shapes(left)["kernel"] == (*[3] * dimensions, 4, multiplier)


@pytest.mark.parametrize(("dimensions", "multiplier"), [(1, 1), (2, 2), (3, 1)])
def test_depthwise_convolutions_as_keras_groups(dimensions, multiplier):
    x = inputs(2, *SIZES[:dimensions], 4)
    module = getattr(nn, f"Conv{dimensions}d")(4, 4 * multiplier, 3, groups=4)
    layer = getattr(layers, f"Conv{dimensions}D")(4 * multiplier, 3, groups=4)
    left, right = pair(module, layer, [x], channels_last(module))
    check(left, right, [x])
    assert names_and_shapes(right)["kernel"] == (*[3] * dimensions, 4, multiplier)


def test_a_convolution_of_one_channel_is_an_ordinary_one():
    x = inputs(2, 9, 1)
    module = nn.Conv1d(1, 5, 3)
    left, right = pair(module, layers.Conv1D(5, 3), [x], channels_last(module))
    check(left, right, [x])
    assert names_and_shapes(left)["kernel"] == (3, 1, 5)


@pytest.mark.parametrize(("dimensions", "affine"), [(1, True), (2, False), (3, True)])
def test_batch_norm(dimensions, affine):
    x = inputs(2, *SIZES[:dimensions], 4)
    module = getattr(nn, f"BatchNorm{dimensions}d")(4, eps=1e-3, affine=affine)
    layer = layers.BatchNormalization(epsilon=1e-3, center=affine, scale=affine)
    left, right = pair(module, layer, [x], channels_last(module))
    check(left, right, [x])
    statistics = {"moving_mean": (4,), "moving_variance": (4,)}
    assert names_and_shapes(left) == ({"gamma": (4,), "beta": (4,)} if affine else {}) | statistics


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        (nn.LayerNorm(6, eps=1e-3), layers.LayerNormalization(epsilon=1e-3)),
        (nn.LayerNorm(6, eps=1e-3, bias=False), layers.LayerNormalization(epsilon=1e-3, center=False)),
        (nn.LayerNorm([5, 6], eps=1e-3), layers.LayerNormalization(axis=[1, 2], epsilon=1e-3)),
        (nn.RMSNorm(6, eps=1e-6), layers.RMSNormalization(epsilon=1e-6)),
    ],
)
def test_layer_norm_and_rms_norm(module, layer):
    x = inputs(3, 5, 6)
    left, right = pair(module, layer, [x])
    check(left, right, [x])
    assert "gamma" in names_and_shapes(left)


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm(affine):
    x = inputs(3, 5, 5, 6)
    module = nn.GroupNorm(2, 6, eps=1e-3, affine=affine)
    layer = layers.GroupNormalization(2, epsilon=1e-3, center=affine, scale=affine)
    left, right = pair(module, layer, [x], channels_last(module))
    check(left, right, [x])


def test_embedding():
    x = RANDOM.randint(0, 7, (3, 4))
    left, right = pair(nn.Embedding(7, 5), layers.Embedding(7, 5), [x])
    check(left, right, [x])
    assert names_and_shapes(left) == {"embeddings": (7, 5)}


RECURRENT = [("LSTM", 4), ("GRU", 3), ("RNN", 1)]


def keras_layer(kind, units, **options):
    return getattr(layers, "SimpleRNN" if kind == "RNN" else kind)(units, return_sequences=True, **options)


@pytest.mark.parametrize(
    ("kind", "gates", "bias"), [("LSTM", 4, True), ("GRU", 3, True), ("GRU", 3, False), ("RNN", 1, False)]
)
def test_recurrent_layers(kind, gates, bias):
    x = inputs(2, 6, 4)
    module = getattr(nn, kind)(4, 5, batch_first=True, bias=bias)
    left, right = pair(module, keras_layer(kind, 5, use_bias=bias), [x])
    check(left, right, [x])
    expected = {"kernel": (4, 5 * gates), "recurrent_kernel": (5, 5 * gates)}
    if bias:
        expected["bias"] = (2, 15) if kind == "GRU" else (5 * gates,)
    assert names_and_shapes(left) == expected


@pytest.mark.parametrize(("kind", "gates"), RECURRENT)
def test_bidirectional_layers(kind, gates):
    x = inputs(2, 6, 4)
    module = getattr(nn, kind)(4, 5, batch_first=True, bidirectional=True)
    left, right = pair(module, layers.Bidirectional(keras_layer(kind, 5)), [x])
    check(left, right, [x])
    assert names_and_shapes(left)["backward_layer/kernel"] == (4, 5 * gates)


class Stack(layers.Layer):
    """Recurrent layers one over the other, held in a list."""

    def __init__(self, *stacked):
        super().__init__()
        self.layer = list(stacked)

    def call(self, x):
        for layer in self.layer:
            x = layer(x)
        return x


@pytest.mark.parametrize(
    ("kind", "gates", "bidirectional"), [("LSTM", 4, True), ("GRU", 3, False), ("RNN", 1, True)]
)
def test_stacked_recurrent_layers(kind, gates, bidirectional):
    x = inputs(2, 6, 4)
    stacked = [keras_layer(kind, 5) for _ in range(2)]
    if bidirectional:
        stacked = [layers.Bidirectional(layer) for layer in stacked]
    module = getattr(nn, kind)(4, 5, num_layers=2, batch_first=True, bidirectional=bidirectional)
    holder = nn.Module()
    holder.layer = module
    left, right = pair(holder, Stack(*stacked), [x], lambda x: module(x)[0])
    check(left, right, [x])
    place = "layer/1/forward_layer" if bidirectional else "layer/1"
    assert names_and_shapes(left)[f"{place}/kernel"] == (10 if bidirectional else 5, 5 * gates)


def test_cells_stacked_in_one_layer():
    x = inputs(2, 6, 4)
    module = nn.LSTM(4, 5, num_layers=2, batch_first=True)
    layer = layers.RNN([layers.LSTMCell(5), layers.LSTMCell(5)], return_sequences=True)
    check(*pair(module, layer, [x]), [x])


def test_an_lstm_with_a_projection_keeps_its_name():
    side = TorchSide(nn.LSTM(3, 4, proj_size=2))
    assert {name: value.shape for name, value in side.read().items() if name.startswith("model/")} == {
        "model/kernel": (3, 16),
        "model/recurrent_kernel": (2, 16),
        "model/bias": (16,),
        "model/weight_hr_l0": (2, 4),
    }


@pytest.mark.parametrize("kind", ["LSTM", "GRU"])
def test_recurrent_cells(kind):
    x, h = inputs(2, 4), inputs(2, 5)
    states = [h, h] if kind == "LSTM" else [h]
    module, cell = getattr(nn, f"{kind}Cell")(4, 5), getattr(layers, f"{kind}Cell")(5)

    class Cell(Joint):
        def __init__(self):
            super().__init__()
            self.layer = cell

        def call(self, inputs):
            x, *states = inputs
            return self.layer(x, states)[0]

    holder = nn.Module()
    holder.layer = module
    left, right = pair(holder, Cell(), [x, *states], lambda x, *s: module(x, s if kind == "LSTM" else s[0]))
    check(left, right, [x, *states])


@pytest.mark.parametrize("bias", [True, False])
def test_attention(bias):
    x, y = inputs(2, 5, 8), inputs(2, 7, 8)
    module = nn.MultiheadAttention(8, 2, batch_first=True, bias=bias)
    layer = layers.MultiHeadAttention(2, 4, use_bias=bias)
    left, right = pair(module, layer, [x, y], lambda x, y: module(x, y, y))
    check(left, right, [x, y])
    found = names_and_shapes(left)
    assert found["query/kernel"] == (8, 2, 4)
    assert found["attention_output/kernel"] == (2, 4, 8)
    assert found.get("value/bias") == ((2, 4) if bias else None)
    assert len(found) == (8 if bias else 4)


@pytest.mark.parametrize("bias", [True, False])
def test_attention_to_keys_and_values_of_other_widths(bias):
    query, value, key = inputs(2, 5, 8), inputs(2, 7, 6), inputs(2, 7, 10)
    module = nn.MultiheadAttention(8, 2, batch_first=True, kdim=10, vdim=6, bias=bias)
    layer = layers.MultiHeadAttention(2, 4, use_bias=bias)
    left, right = pair(module, layer, [query, value, key], lambda q, v, k: module(q, k, v))
    check(left, right, [query, value, key])
    assert names_and_shapes(left)["key/kernel"] == (10, 2, 4)


def test_what_keras_attention_does_not_have_keeps_its_name():
    side = TorchSide(nn.MultiheadAttention(8, 2, add_bias_kv=True))
    state = side.read()
    assert {"model/bias_k", "model/bias_v", "model/query/kernel"} <= state.keys()
    side.randomize()
    side.write(state)
    assert (side.read()["model/bias_k"] == state["model/bias_k"]).all()
