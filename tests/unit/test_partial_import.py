"""A part of a file of weights: in both frameworks, by the file's names and by portable ones."""

import numpy as np
import pytest
from support.twins import keras, torch

from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.records import Choice
from hvdtrain.backends.tensorflow.export import load_weights_file as load_keras
from hvdtrain.backends.tensorflow.state.model_state import ModelState as KerasState
from hvdtrain.backends.torch.export import load_weights_file as load_torch
from hvdtrain.backends.torch.state.model_state import ModelState as TorchState
from hvdtrain.errors import CheckpointError

BODY = {"model/body/kernel", "model/body/bias", "model/norm/gamma", "model/norm/beta"}
BODY |= {"model/norm/moving_mean", "model/norm/moving_variance"}


class Torch:
    """A small model of PyTorch, and its file."""

    head_in_file, file = "head.*", "w.pt"

    def model(self, classes, body="body"):
        layers = {body: torch.nn.Linear(4, 3), "norm": torch.nn.BatchNorm1d(3)}
        return torch.nn.ModuleDict({**layers, "head": torch.nn.Linear(3, classes)})

    def save(self, model, path):
        torch.save(model.state_dict(), path)

    def state(self, model):
        return TorchState(model, Renaming(None, "torch"))

    load = staticmethod(load_torch)


class Keras:
    """Its twin in Keras."""

    head_in_file, file = "layers/dense_1/*", "w.weights.h5"

    def model(self, classes, body="body"):
        inputs = keras.Input((4,))
        x = keras.layers.Dense(3, name=body)(inputs)
        x = keras.layers.BatchNormalization(name="norm")(x)
        return keras.Model(inputs, keras.layers.Dense(classes, name="head")(x))

    def save(self, model, path):
        model.save_weights(path)

    def state(self, model):
        return KerasState(model, Renaming(None, "tf"))

    load = staticmethod(load_keras)


@pytest.fixture(params=[Torch, Keras], ids=["torch", "tf"])
def side(request):
    return request.param()


def values(state):
    return {field.name: np.array(field.read()) for field in state.fields}


def loaded(side, tmp_path, choice, classes=5):
    """Load a part of a file, made by a model with 2 classes; give what was said, and what changed."""
    source, target = side.model(2), side.model(classes)
    path = tmp_path / side.file
    for field in side.state(source).fields:
        array = np.full(field.shape, 7.0, np.float32)
        field.write({field.name: array})
    side.save(source, path)
    state = side.state(target)
    before = values(state)
    said = side.load(target, path, choice, state.fields)
    after = values(state)
    changed = {name for name in after if not np.array_equal(before[name], after[name])}
    assert all((after[name] == 7.0).all() for name in changed)
    return said, changed


def choice(only=(), skip=()):
    return Choice(only, skip, ("--only", "--skip"))


@pytest.mark.parametrize("by", ["portable", "file"])
def test_a_new_head_is_left_out_by_either_name(side, tmp_path, by):
    pattern = "model/head/*" if by == "portable" else side.head_in_file
    said, changed = loaded(side, tmp_path, choice(skip=(pattern,)))
    assert changed == BODY
    assert "\n6 of 8 arrays taken, 27 of 47 numbers\n" in said
    assert f"= model/head/bias (5,): --skip {pattern!r}; there (2,)" in said


def test_only_what_matches_is_taken(side, tmp_path):
    _, changed = loaded(side, tmp_path, choice(only=("model/body/*",)), classes=2)
    assert changed == {"model/body/kernel", "model/body/bias"}


@pytest.mark.parametrize("chosen", [choice(), choice(only=("model/*",))], ids=["all", "a part"])
def test_a_head_of_another_shape_says_which_option_leaves_it_out(side, tmp_path, chosen):
    with pytest.raises(CheckpointError) as caught:
        loaded(side, tmp_path, chosen)
    assert caught.value.remedy.endswith("To take the rest, add: --skip 'model/head/*'")


def test_a_layer_of_keras_is_not_loaded_into_another_one(tmp_path):
    """Keras goes by the order of layers, which one more layer in front changes."""
    side, path = Keras(), tmp_path / "w.weights.h5"
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, name="adapter")(inputs)
    longer = keras.Model(inputs, keras.layers.Dense(4, name="body")(x))
    inputs = keras.Input((4,))
    x = keras.layers.Dense(4, name="body")(inputs)
    side.save(keras.Model(inputs, x), path)
    with pytest.raises(
        CheckpointError, match="its layer 'body' is at the place of the model's layer 'adapter'"
    ):
        side.load(longer, path, choice(skip=("model/body/*",)), side.state(longer).fields)
