"""What ``parity`` concludes of two frameworks' observations."""

import math
from dataclasses import replace

import numpy as np
import pytest

from hvdtrain.tools.parity.explanation import place_of
from hvdtrain.tools.parity.findings import different_settings
from hvdtrain.tools.parity.observation import ForwardPass, LayerCall, Observation, StepState
from hvdtrain.tools.parity.rows import first_divergence, make_rows
from hvdtrain.tools.parity.verdict import Comparison, judge

RANDOM = np.random.RandomState(2)


NAMES = ("model/a/kernel", "model/b/c/kernel", "model/e/kernel")


def call(path, inputs, outputs, **settings):
    return LayerCall(path, "Layer", settings, inputs, outputs)


def test_the_first_layer_that_differs_is_named_and_whether_it_is_its_input():
    x, y, z = (RANDOM.standard_normal((3, 4)) for _ in range(3))
    left = ForwardPass((call("a", x, y), call("b/c", y, z), call("b", y, z)), z, z)
    right = ForwardPass((call("a", x, y), call("b/c", y, z + 1)), z + 1, z)
    rows = make_rows(left, right, NAMES)
    assert [row.path for row in rows] == ["a", "b/c", "(outputs)"]
    found = first_divergence(rows, 1e-6)
    assert (found.row.path, found.before) == ("b/c", False)
    right = ForwardPass((call("a", x, y), call("b/c", y + 1, z)), z, z)
    found = first_divergence(make_rows(left, right, NAMES), 1e-6)
    assert (found.row.path, found.before) == ("b/c", True)
    assert first_divergence(make_rows(left, left, NAMES), 1e-6) is None


def test_layers_without_parameters_may_have_a_name_in_common_by_chance():
    x, y, z = (RANDOM.standard_normal((3, 4)) for _ in range(3))
    a, e = call("a", x, y), call("e", z, z)
    left = ForwardPass((a, call("d", x, z, rate=0.1), e), z, z)
    right = ForwardPass((a, call("d", x, y, rate=0.5), e), z, z)
    rows = make_rows(left, right, NAMES)
    assert first_divergence(rows, 1e-6) is None  # what it gives on agrees
    assert [one.suspect for _, one in different_settings(rows, 1e-6)] == ["rate"]
    right = ForwardPass((a, call("d", x, y), call("e", z + 1, z)), z, z)
    assert first_divergence(make_rows(left, right, NAMES), 1e-6).row.path == "d"
    right = ForwardPass((a, call("d", y, y, rate=0.5), call("e", z + 1, z)), z, z)
    rows = make_rows(left, right, NAMES)  # given something else, it is another place of the model
    found = first_divergence(rows, 1e-6)
    assert (found.row.path, found.before, [row.path for row in found.earlier]) == ("e", True, ["a"])
    assert list(different_settings(rows, 1e-6)) == []


def test_all_outputs_of_a_model_are_compared():
    x, y = (RANDOM.standard_normal((3, 4)) for _ in range(2))
    sides = [ForwardPass((), x, x, more_outputs=(x, one)) for one in (y, y + 1)]
    rows = make_rows(*sides, NAMES)
    assert [row.path for row in rows] == ["(outputs)", "(outputs) #2", "(outputs) #3"]
    found = first_divergence(rows, 1e-6)
    assert place_of(found) == "before the model's outputs #3"


def test_axes_of_the_outputs_in_another_order_are_named_without_layers_of_channels():
    x, square = np.ones((3, 2)), RANDOM.standard_normal((3, 4, 4))

    def found(**changes):
        sides = []
        for name, outputs in (("torch", square), ("tf", square.swapaxes(1, 2))):
            calls = (replace(call("a", x, x), **changes),)
            sides.append(observed(name, forward=ForwardPass(calls, outputs, np.ones(3))))
        return causes(*sides)

    assert [cause[:2] for cause in found()] == [("layout", "the model's outputs")]
    assert found(channels_first=True) == []


def test_a_cast_to_fp32_within_a_layer_is_rounding():
    def found(apart, narrow=""):
        sides = []
        for number, name in enumerate(("torch", "tf")):
            outputs = np.ones((3, 2)) + number * apart
            layer = call("a", np.ones((3, 2)), outputs)
            forward = ForwardPass((layer,), outputs, np.ones(3), narrow=narrow)
            sides.append(observed(name, forward=forward))
        comparison = Comparison.of(*sides)
        return judge(comparison, comparison, START)

    assert not found(1e-7).has_parity
    assert found(1e-7, "a").has_parity
    assert "a in PyTorch computes in fp32" in found(1e-7, "a").notes[0]
    assert not found(1e-4, "a").has_parity
    assert not found(1e-7, "the loss").has_parity  # of which alone that is said


START = {"model/a/kernel": np.ones((2, 2)), "model/a/bias": np.zeros(2)}


def observed(framework, moved=1.0, loss=1.0, gradient=1.0, **changes):
    """Give what a framework tells of a layer that trains for a step."""
    outputs = np.ones((3, 2))
    forward = ForwardPass((call("a", outputs, outputs),), outputs, np.ones(3))
    gradients = {
        name: gradient * np.arange(1.0, value.size + 1).reshape(value.shape) for name, value in START.items()
    }
    after = {name: value - moved * gradients[name] for name, value in START.items()}
    state = StepState(1, loss, gradients, after)
    fields = {"forward": forward, "steps": (state,), "trained": tuple(START), "batches": {1: 5}}
    return Observation(framework, **fields | changes)


def causes(left, right):
    comparison = Comparison.of(left, right)
    return [(one.suspect, one.layer, one.text) for one in judge(comparison, comparison, START).findings]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_precision_of_the_job_is_judged_too(precision):
    def found(**changes):
        wide = Comparison.of(observed("torch"), observed("tf"))
        usual = Comparison.of(observed("torch"), observed("tf", **changes))
        return judge(usual, wide, START, precision=precision).findings

    assert found() == []
    (nan,) = found(loss=math.nan)
    assert nan.text.startswith(f"TensorFlow's is nan in step 1 in {precision}")
    (nan,) = found(forward=replace(observed("tf").forward, losses=np.asarray([1.0, math.inf, 1.0])))
    assert f"not finite in TensorFlow alone, in {precision}" in nan.text
    outputs = np.full((3, 2), 1.2)
    forward = ForwardPass((call("a", np.ones((3, 2)), outputs),), outputs, np.ones(3))
    (apart,) = found(forward=forward)
    assert (apart.suspect, apart.layer) == ("precision", "a")
    assert f"in {precision}, and not in fp64" in apart.text
    of_gradients = found(gradient=1.5, moved=1 / 1.5)
    assert [one.layer for one in of_gradients] == (["the gradients"] if precision == "fp32" else [])


@pytest.mark.parametrize(
    ("changes", "suspect", "text"),
    [
        ({"batches": {1: 6}}, "data", "other samples"),
        ({"loss": math.nan}, "loss that is not finite", "TensorFlow's is nan in step 1"),
        ({"trained": ("model/a/kernel",)}, "frozen parameters", "PyTorch trains a/bias"),
        ({"dropout_rates": (0.5,)}, "dropout rate", "[] in PyTorch, [0.5] in TensorFlow"),
        ({"gradient": 0.0}, "gradient", "it is zero in TensorFlow"),
        ({"gradient": 0.5}, "gradient", "PyTorch's is 2 times TensorFlow's"),
        ({"moved": 0.5}, "update", "PyTorch moves it 2 times as far"),
        (
            {"moved": 0.5, "optimizer": {"constraints": {"model/a/kernel": "MaxNorm"}}},
            "constraint",
            "TensorFlow applies MaxNorm on a/kernel after each update",
        ),
        ({"loss": 1.1}, "loss in training", "differs by 1.0e-01, though losses in evaluation"),
        ({"is_random_in_training": True}, "random numbers in training", "TensorFlow's loss differs"),
        ({"random_layers": ("a",)}, "dropout left on", "TensorFlow gives other outputs in two passes"),
    ],
)
def test_what_differs_is_named(changes, suspect, text):
    (found,) = causes(observed("torch"), observed("tf", **changes))
    assert found[0] == suspect
    assert text in found[2]


def test_optimizers_that_state_other_numbers_are_named():
    sides = [observed(name, optimizer={"momentum": value}) for name, value in (("torch", 0.9), ("tf", 0.8))]
    (found,) = causes(*sides)
    assert found == ("momentum of the optimizer", "the optimizer", "0.9 in PyTorch, 0.8 in TensorFlow")


def test_small_updates_are_compared_with_their_movement():
    def found(moved, other):
        sides = [
            observed(name, moved=value, optimizer={"class": kind})
            for name, value, kind in (("torch", moved, "AdamW"), ("tf", other, "Adam"))
        ]
        return causes(*sides)

    assert found(3e-5, 3e-5 * (1 + 1e-6)) == []
    ((suspect, _, text),) = found(3e-5, 3.03e-5)
    assert suspect == "update"
    assert "differs by 9.9e-03 after a step, relative to what these moved it" in text
    assert "AdamW in PyTorch, Adam in TensorFlow" in text


def test_parameters_that_one_framework_trains_are_one_cause():
    ours, theirs = observed("torch"), observed("tf", trained=("model/a/kernel",))
    (state,) = theirs.steps
    after = {**state.parameters, "model/a/bias": START["model/a/bias"]}
    gradients = {name: 2 * value for name, value in state.gradients.items()}
    theirs = replace(theirs, steps=(replace(state, parameters=after, gradients=gradients),))
    assert [suspect for suspect, *_ in causes(ours, theirs)] == ["frozen parameters"]


@pytest.mark.parametrize(("share", "has"), [(0.02, "TensorFlow"), (-0.02, "PyTorch")])
def test_a_regularizer_of_one_framework_is_told_by_the_gradient(share, has):
    theirs = observed("tf")
    (state,) = theirs.steps
    kernel = "model/a/kernel"
    gradients = {**state.gradients, kernel: state.gradients[kernel] + share * START[kernel]}
    ((suspect, layer, text),) = causes(
        observed("torch"), replace(theirs, steps=(replace(state, gradients=gradients),))
    )
    assert (suspect, layer) == ("regularizer", "a")
    assert text.startswith(f"{has}'s loss has an L2 term of 0.01, such as a layer's regularizer, on a/kernel")
