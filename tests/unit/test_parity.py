"""What ``parity`` and ``prove`` conclude of arrays: what differs first, what of it is rounding, and why."""

import math
from pathlib import Path

import numpy as np
import pytest
from support.twins import keras

from hvdtrain.errors import TaskError
from hvdtrain.tools.parity import observation, proof, prove
from hvdtrain.tools.parity import tensorflow as of_layers
from hvdtrain.tools.parity.parity import check_task, describe
from hvdtrain.tools.parity.verdict import different_settings, is_reordered, judge

RANDOM = np.random.RandomState(2)


def test_symptoms_are_told_by_numbers():
    one = np.asarray([1.0, np.nan])
    assert observation.difference(one, one).relative == 0
    assert observation.difference(one, np.asarray([1.0, 2.0])).relative == math.inf
    x = RANDOM.standard_normal((5, 6))
    assert observation.constant_factor(3 * x, x) == pytest.approx(3)
    assert observation.constant_factor(x, x) is observation.constant_factor(x + 1, x) is None
    assert is_reordered(x, x[:, ::-1])
    assert not is_reordered(x, x + 1)


def test_a_task_without_a_model_or_with_its_own_step_is_refused():
    half = type("Half", (), {"torch_model": print})
    with pytest.raises(TaskError, match=r"has no tf_model\(\)"):
        check_task(half, "Half")
    with pytest.raises(TaskError, match="has tf_step"):
        check_task(type("OwnStep", (half,), {"tf_model": print, "tf_step": print}), "OwnStep")


NAMES = ("model/a/kernel", "model/b/c/kernel", "model/e/kernel")


def call(path, inputs, outputs, **settings):
    return observation.LayerCall(path, "Layer", inputs, outputs, settings)


def test_the_first_layer_that_differs_is_named_and_whether_it_is_its_input():
    x, y, z = (RANDOM.standard_normal((3, 4)) for _ in range(3))
    calls = call("a", x, y, epsilon=0.1), call("b/c", y, z), call("b", y, z)
    left = observation.ForwardPass(calls, (z,), z)
    right = observation.ForwardPass((call("a", x, y, epsilon=0.2), call("b/c", y, z + 1)), (z + 1,), z)
    rows = observation.make_rows(left, right, NAMES)
    assert [row.path for row in rows] == ["a", "b/c", "(outputs)"], "b has no parameters"
    (found,) = different_settings(rows)
    assert (found.suspect, found.layer, found.text) == ("epsilon", "a", "0.1 in PyTorch, 0.2 in TensorFlow")
    assert observation.first_divergence(rows, 1e-6).place == "b/c"
    right = observation.ForwardPass((call("a", x, y), call("b/c", y + 1, z)), (z,), z)
    rows = observation.make_rows(left, right, NAMES)
    assert observation.first_divergence(rows, 1e-6).place == "between a and b/c"
    assert observation.first_divergence(observation.make_rows(left, left, NAMES), 1e-6) is None


START = {"model/a/kernel": np.ones((2, 2)), "model/a/bias": np.full(2, 0.5)}


def observed(framework, moved=1.0, **changes):
    """Give the observation of a layer that trains for a step."""
    outputs = np.ones((3, 2))
    forward = observation.ForwardPass((call("a", outputs, outputs),), (outputs,), np.ones(3))
    steps = {name: np.arange(1.0, value.size + 1).reshape(value.shape) for name, value in START.items()}
    after = {name: value - moved * steps[name] for name, value in START.items()}
    fields = {"forward": forward, "losses": {1: 1.0}, "arrays": {1: after}, "trained": tuple(START)}
    given = {"initial": START, "batches": (5,)} | fields | changes
    return observation.Observation(framework, **given)


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
    own = type("Own", (keras.layers.Dropout,), {})
    names = ("Dropout", "SpatialDropout1D", "SpatialDropout2D", "SpatialDropout3D", "AlphaDropout")
    layers = [own(0.5), *(getattr(keras.layers, name)(0.5) for name in names)]
    assert of_layers.stop_dropout(keras.Sequential(layers)) == [0.5] * 6
    assert all(layer.rate == 0 for layer in layers)


BEGIN = {"model/a/kernel": np.zeros((2, 2)), "model/queue": np.zeros(3)}
TRAINED = ["model/a/kernel"]


def run_of(loss=1.0, kernel=1.0, queue=1.0):
    def state(step):
        return {"model/a/kernel": np.full((2, 2), step * kernel), "model/queue": np.full(3, queue)}

    return proof.Run({1: 2.0, 2: loss}, state, {})


def test_the_first_step_and_tensor_that_differ_are_named():
    rounding = proof.Rounding(BEGIN, TRAINED)
    assert proof.compare(run_of(), run_of(kernel=1 + 1e-7), rounding).step == 0
    found = proof.compare(run_of(), run_of(loss=1.1, kernel=0.5, queue=2.0), rounding)
    assert (found.step, found.name, found.text) == (1, "model/a/kernel", "it moved 0.5 times as far")
    found = proof.compare(run_of(), run_of(loss=1.1, queue=2.0), rounding)
    assert (found.step, found.name) == (1, "model/queue")
    found = proof.compare(run_of(), run_of(loss=1.1), rounding)
    assert (found.step, found.name, found.text) == (2, "", "it is 1.1 in place of 1")
    assert proof.compare(run_of(), run_of(kernel=0.5), rounding, first=2).step == 2
    noise = {(step, "model/a/kernel"): 0.01 for step in (1, 2)}
    assert proof.compare(run_of(), run_of(kernel=1.05), rounding).step == 1
    rounding = proof.Rounding(BEGIN, TRAINED, arrays=noise)
    assert proof.compare(run_of(), run_of(kernel=1.05), rounding).step == 0


@pytest.mark.parametrize(
    ("traits", "is_plain", "text"),
    [
        (proof.Traits(generators=("torch",)), False, ""),
        (proof.Traits(generators=("numpy",), is_hidden=True), False, "what no checkpoint has"),
        (proof.Traits(depends="depends on others"), True, ""),
        (proof.Traits(drawn="inputs"), True, "reading a batch again gives another 'inputs'"),
        (proof.Traits(has_own_step=True), False, "the task's own step"),
        (proof.Traits(has_callbacks=True), True, "the task's callbacks"),
    ],
)
def test_the_cause_follows_from_what_the_task_does(traits, is_plain, text):
    found = proof.Comparison(step=1, name="model/queue")
    cause = proof.cause_of(found, traits, is_plain=is_plain, framework="torch")
    assert text in cause
    assert bool(text) == bool(cause)


def test_losses_of_halves_show_what_depends_on_the_batch_and_evaluations_are_compared():
    whole = np.arange(4.0)
    halves = [(whole[:2], None), (whole[2:], None)]
    assert proof.splits((whole, None), *halves) == ""
    assert "depends on others" in proof.splits((whole + 1, None), *halves)
    means = [(np.asarray(0.5), None), (np.asarray(2.5), None)]
    assert proof.splits((np.asarray(1.5), None), *means) == ""
    assert "is a sum" in proof.splits((np.asarray(3.0), None), *means)
    assert "no mean of" in proof.splits((np.asarray(9.0), None), *means)
    weighted = [(np.asarray(1.0), np.asarray(3)), (np.asarray(5.0), np.asarray(1))]
    assert proof.splits((np.asarray(2.0), np.asarray(4)), *weighted) == ""
    assert proof.splits((np.asarray(3.0), np.asarray(4)), *weighted)

    one = {"loss": 1.0, "accuracy": 0.5}
    assert proof.compare_evaluations(one, {"loss": 1.0 + 1e-6, "accuracy": 0.5}) == {}
    assert proof.compare_evaluations(one, {"loss": 1.0, "accuracy": 0.6}) == {"accuracy": (0.5, 0.6)}


def test_the_screen_is_the_golden_one():
    rows = [
        {"what": "a plain loop and hvdtrain, 1 worker", "ok": True, "text": "", "cause": "",
         "loss": 1e-7, "parameters": 3e-7, "buffers": 0.0},
        {"what": "1 worker and 2", "ok": False, "text": "step 1, queue: it differs by 5.9e-01 of its values",
         "cause": "buffer 'queue' is each worker's own", "loss": 4e-4, "parameters": 8e-3, "buffers": 0.8},
        {"what": "stopped at step 2 of 2 workers, resumed by 1", "ok": None, "text": "not compared",
         "cause": ""},
        {"what": "the trained model, loaded by hvdtrain.load", "ok": True, "text": "bit by bit", "cause": ""},
    ]  # fmt: skip
    found = {
        "framework": "torch", "task": "mine.py:Mine", "batch": 32, "steps": 4, "workers": 2, "seconds": 9.4,
        "rows": rows, "notes": ["left out of the comparison: lr_schedule"], "proved": False,
    }  # fmt: skip
    golden = Path(__file__).with_name("golden") / "prove.txt"
    assert prove.describe(found) + "\n" == golden.read_text()
