"""Whole models as portable state: paths of all kinds of models, shared weights, buffers, kinds of numbers."""

from collections import OrderedDict

import numpy as np
import pytest
from support.twins import RANDOM, KerasSide, TorchSide, assert_same, check, keras, torch

from hvdtrain.errors import TaskError

nn, layers = torch.nn, keras.layers
X = RANDOM.standard_normal((3, 4)).astype(np.float32)


def names(side):
    return sorted(name.removeprefix("model/") for name in side.read() if name.startswith("model/"))


def keras_side(model, x=X):
    model(x)
    return KerasSide(model)


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense1 = layers.Dense(5, activation="silu", name="goes_by_its_attribute")
        self.dense2 = layers.Dense(2)

    def call(self, x):
        return self.dense2(self.dense1(x))


def torch_plain():
    return nn.Sequential(OrderedDict(dense1=nn.Linear(4, 5), act=nn.SiLU(), dense2=nn.Linear(5, 2)))


def test_a_subclassed_model_goes_by_its_attributes():
    left, right = TorchSide(torch_plain()), keras_side(Subclassed())
    check(left, right, [X])
    assert names(right) == ["dense1/bias", "dense1/kernel", "dense2/bias", "dense2/kernel"]


def test_state_names_make_models_of_other_names_fit():
    module = nn.Sequential(nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 2))
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dense(2, name="head")(layers.Dense(5, activation="silu", name="body")(x)))
    names_of = {"torch": {"0": "net/in", "2.kernel": "net/out/kernel", "2": "net/out"}}
    names_of["tf"] = {"body": "net.in", "head": "net.out"}
    check(TorchSide(module, state_names=names_of), KerasSide(model, state_names=names_of), [X])


class TorchTied(nn.Module):
    def __init__(self):
        super().__init__()
        self.decoder = nn.Linear(4, 7, bias=False)  # before the embedding, so that order does not decide
        self.embedding = nn.Embedding(7, 4)
        self.decoder.weight = self.embedding.weight

    def forward(self, x):
        return self.decoder(torch.tanh(self.embedding(x)))


class KerasTied(keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(7, 4)

    def call(self, x):
        return keras.ops.tanh(self.embedding(x)) @ keras.ops.transpose(self.embedding.embeddings)


def test_an_embedding_tied_to_the_output_is_one_array():
    x = RANDOM.randint(0, 7, (2, 5))
    left, right = TorchSide(TorchTied()), keras_side(KerasTied(), x)
    check(left, right, [x])
    assert names(left) == ["embedding/embeddings"]
    assert left.module.decoder.weight is left.module.embedding.weight


class TorchShared(nn.Module):
    def __init__(self):
        super().__init__()
        dense = nn.Linear(4, 4)
        self.steps = nn.ModuleList([dense, dense])
        self.step = dense

    def forward(self, x):
        return self.steps[1](torch.tanh(self.step(x)))


class KerasShared(keras.Model):
    def __init__(self):
        super().__init__()
        self.step = layers.Dense(4)
        self.steps = [self.step, self.step]

    def call(self, x):
        return self.steps[1](keras.ops.tanh(self.step(x)))


def test_a_shared_layer_goes_by_its_shortest_path_or_the_name_that_the_task_gives():
    left, right = TorchSide(TorchShared()), keras_side(KerasShared())
    check(left, right, [X])
    assert names(left) == ["step/bias", "step/kernel"]
    side = TorchSide(TorchShared(), state_names={"torch": {"steps.1": "twice"}})
    assert names(side) == ["twice/bias", "twice/kernel"]


def test_the_count_of_batches_is_kept_where_it_decides_and_compiled_modules_keep_their_names():
    module = nn.Sequential(nn.Linear(4, 2))
    module[0] = torch.compile(module[0])
    assert names(TorchSide(torch.compile(module))) == ["0/bias", "0/kernel"]
    assert "num_batches_tracked" in names(TorchSide(nn.BatchNorm1d(3, momentum=None)))
    assert "num_batches_tracked" not in names(TorchSide(nn.BatchNorm1d(3)))


class KerasKinds(keras.Model):
    def __init__(self):
        super().__init__()
        for kind in ("bfloat16", "float16", "int64", "bool"):
            options = {"trainable": False, "initializer": "zeros", "autocast": False}
            setattr(self, f"of_{kind}", self.add_weight(shape=(3,), dtype=kind, name=kind, **options))
        self.dense = layers.Dense(2)

    def call(self, x):
        return self.dense(x)


def test_all_kinds_of_variables_survive():
    side = keras_side(KerasKinds())
    side.model.of_bfloat16.assign([1.5, -3.0, 2.0**-100])
    side.model.of_int64.assign([2**40, 0, -1])
    side.model.of_bool.assign([True, False, True])
    state = side.read()
    assert state["model/bfloat16"].dtype == np.float32
    assert state["model/int64"].tolist() == [2**40, 0, -1]
    fresh = keras_side(KerasKinds())
    fresh.write(state)
    assert_same(fresh.read(), state)


def test_two_tensors_of_one_name_are_refused_naming_both():
    colliding = nn.ModuleDict({"dense": nn.Linear(2, 2)})
    colliding["dense"].kernel = nn.Parameter(torch.zeros(2))
    with pytest.raises(TaskError, match=r"name dense/kernel: dense\.weight and dense\.kernel"):
        TorchSide(colliding)
    with pytest.raises(TaskError, match=r"name a/kernel: dense1\.weight and dense2\.weight"):
        TorchSide(torch_plain(), state_names={"torch": {"dense1": "a", "dense2": "a"}})
    x = keras.Input((4,))
    model = keras.Model(x, layers.Dense(2, name="a")(layers.Dense(2, name="b")(x)))
    with pytest.raises(TaskError, match="name a/kernel: b/kernel and a/kernel"):
        KerasSide(model, state_names={"tf": {"b": "a"}})


def test_the_two_biases_of_an_lstm_come_back_or_become_the_sum_and_zero():
    side, fresh = (TorchSide(nn.LSTM(3, 4, num_layers=2)) for _ in range(2))
    state = side.read()
    fresh.write({**state, "tf/model/anything": np.zeros(3)})
    for name, value in side.module.named_parameters():
        assert torch.equal(value, fresh.module.state_dict()[name]), name
    changed = {**state, "model/1/bias": state["model/1/bias"] + 1}
    lacking = {name: value for name, value in state.items() if name != "torch/model/bias_ih_l1"}
    for given in (changed, lacking):
        fresh.write(given)
        assert fresh.module.bias_ih_l1.tolist() == given["model/1/bias"].tolist()
        assert not fresh.module.bias_hh_l1.any()
        assert fresh.module.bias_hh_l0.any()
