"""The parts of ``parity`` that need no framework: arrays compared, causes found by numbers, findings."""

import math

import numpy as np
import pytest
from support.twins import keras

from hvdtrain.errors import TaskError
from hvdtrain.tools.parity import tensorflow as of_layers
from hvdtrain.tools.parity.observation import (
    ForwardPass,
    LayerCall,
    Observation,
    constant_factor,
    difference,
    first_divergence,
    make_rows,
)
from hvdtrain.tools.parity.parity import check_task, describe
from hvdtrain.tools.parity.verdict import different_settings, is_reordered, judge

RANDOM = np.random.RandomState(2)


def test_symptoms_are_told_by_numbers():
    one = np.asarray([1.0, np.nan])
    assert difference(one, one).relative == 0
    assert difference(one, np.asarray([1.0, 2.0])).relative == math.inf
    x = RANDOM.standard_normal((5, 6))
    assert constant_factor(3 * x, x) == pytest.approx(3)
    assert constant_factor(x, x) is constant_factor(x + 1, x) is None
    assert is_reordered(x, x[:, ::-1])
    assert not is_reordered(x, x + 1)


def test_a_task_without_a_model_or_with_its_own_step_is_refused():
    class Half:
        def torch_model(self): ...

    class OwnStep(Half):
        def tf_model(self): ...
        def tf_step(self): ...

    with pytest.raises(TaskError, match=r"has no tf_model\(\)"):
        check_task(Half, "Half")
    with pytest.raises(TaskError, match="has tf_step"):
        check_task(OwnStep, "OwnStep")


NAMES = ("model/a/kernel", "model/b/c/kernel", "model/e/kernel")


def call(path, inputs, outputs, **settings):
    return LayerCall(path, "Layer", inputs, outputs, settings)


def test_the_first_layer_that_differs_is_named_and_whether_it_is_its_input():
    x, y, z = (RANDOM.standard_normal((3, 4)) for _ in range(3))
    left = ForwardPass((call("a", x, y, epsilon=0.1), call("b/c", y, z), call("b", y, z)), (z,), z)
    right = ForwardPass((call("a", x, y, epsilon=0.2), call("b/c", y, z + 1)), (z + 1,), z)
    rows = make_rows(left, right, NAMES)
    assert [row.path for row in rows] == ["a", "b/c", "(outputs)"], "b has no parameters"
    (found,) = different_settings(rows)
    assert (found.suspect, found.layer, found.text) == ("epsilon", "a", "0.1 in PyTorch, 0.2 in TensorFlow")
    assert first_divergence(rows, 1e-6).place == "b/c"
    right = ForwardPass((call("a", x, y), call("b/c", y + 1, z)), (z,), z)
    assert first_divergence(make_rows(left, right, NAMES), 1e-6).place == "between a and b/c"
    assert first_divergence(make_rows(left, left, NAMES), 1e-6) is None


START = {"model/a/kernel": np.ones((2, 2)), "model/a/bias": np.full(2, 0.5)}


def observed(framework, moved=1.0, **changes):
    """Give the observation of a layer that trains for a step."""
    outputs = np.ones((3, 2))
    forward = ForwardPass((call("a", outputs, outputs),), (outputs,), np.ones(3))
    after = {
        name: value - moved * np.arange(1.0, value.size + 1).reshape(value.shape)
        for name, value in START.items()
    }
    fields = {"forward": forward, "losses": {1: 1.0}, "arrays": {1: after}, "trained": tuple(START)}
    given = {"initial": START, "batches": (5,)} | fields | changes
    return Observation(framework, **given)


@pytest.mark.parametrize(
    ("changes", "suspect", "text"),
    [
        ({"batches": (6,)}, "data", "other samples"),
        ({"losses": {1: math.nan}}, "loss that is not finite", "TensorFlow's is nan in step 1"),
        ({"trained": ("model/a/kernel",)}, "frozen parameters", "PyTorch trains a/bias"),
        ({"dropout_rates": (0.5,)}, "dropout rate", "[] in PyTorch, [0.5] in TensorFlow"),
        ({"moved": 0.5}, "update", "in TensorFlow, it moved 0.5 times as far"),
        ({"losses": {1: 1.1}}, "loss in training", "a loss that is added in training"),
        ({"initial": {**START, "model/a/bias": np.ones(2)}}, "initial value", "a/bias differs by up to 0.5"),
    ],
)
def test_what_differs_is_named(changes, suspect, text):
    (found,) = judge(observed("torch"), observed("tf", **changes)).findings
    assert found.suspect == suspect
    assert text in found.text


def test_without_fp64_the_limits_are_wider():
    assert not judge(observed("torch"), observed("tf", moved=1.005)).has_parity
    result = judge(observed("torch"), observed("tf", moved=1.005, note="not compared in fp64"))
    assert result.has_parity
    assert "not compared in fp64" in describe(result, "task")


def test_dropout_layers_of_all_kinds_are_stopped():
    kl = keras.layers

    class Own(kl.Dropout): ...

    names = ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout")
    layers = [Own(0.5), *(getattr(kl, name)(0.5) for name in names)]
    assert of_layers.stop_dropout(keras.Sequential(layers)) == [0.5] * 6
    assert all(layer.rate == 0 for layer in layers)
