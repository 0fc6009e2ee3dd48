"""The parts of ``parity`` that need no framework: arrays compared, causes told by numbers, roles, paths."""

import math

import numpy as np
import pytest

from hvdtrain.errors import TaskError
from hvdtrain.tools.parity import command
from hvdtrain.tools.parity.findings import (
    activation_between,
    constant_factor,
    different_beginnings,
    differs_but_at_the_end,
    is_reordered,
    mask_of,
    product_with,
    zero_borders,
)
from hvdtrain.tools.parity.job import check_task, match
from hvdtrain.tools.parity.observation import aligned, difference
from hvdtrain.tools.parity.side import find_role

RANDOM = np.random.RandomState(2)


def test_numbers_that_are_nan_in_both_are_equal_and_in_one_infinitely_apart():
    one = np.asarray([1.0, np.nan])
    assert difference(one, one).relative == 0
    assert difference(one, np.asarray([1.0, 2.0])).relative == math.inf
    assert difference(np.asarray([2.0]), np.asarray([1.0])).relative == 0.5


def test_channels_first_is_brought_to_channels_last():
    last = RANDOM.standard_normal((2, 4, 4, 4))
    left, right = aligned(np.moveaxis(last, -1, 1), last, left_first=True)
    np.testing.assert_array_equal(left, right)
    assert aligned(last, RANDOM.standard_normal((2, 5))) is None


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("ReLU", lambda x: np.maximum(x, 0)),
        ("SiLU", lambda x: x / (1 + np.exp(-x))),
        ("GELU by tanh", lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("", np.sin),
    ],
)
def test_activations_are_told_by_their_numbers(name, function):
    x = RANDOM.standard_normal((8, 9)).astype(np.float32)
    assert activation_between(x, function(x)) == name


def test_symptoms_are_told_by_numbers():
    x = RANDOM.standard_normal((5, 6))
    assert constant_factor(3 * x, x) == pytest.approx(3)
    assert constant_factor(x, x) is None
    assert constant_factor(x + 1, x) is None
    assert is_reordered(x, x[:, ::-1])
    assert not is_reordered(x, x + 1)
    kernel = RANDOM.standard_normal((6, 6))
    assert product_with(kernel, None, x, x @ kernel) == "as it is"
    assert product_with(kernel, x[0], x, x @ kernel.T + x[0]) == "transposed"
    padded = np.pad(RANDOM.standard_normal((2, 3, 3, 1)), [(0, 0), (0, 1), (2, 0), (0, 0)])
    assert zero_borders(padded) == [(0, 1), (2, 0)]


def test_a_missing_bias_can_be_compared_and_another_name_cannot():
    kernel, bias = np.ones((2, 2)), np.ones(2)
    found = match({"model/a/kernel": kernel, "model/a/bias": bias}, {"model/a/kernel": kernel})
    assert found.can_compare
    assert [(one.suspect, one.layer) for one in found.findings] == [("missing bias", "a")]
    found = match({"model/a/kernel": kernel}, {"model/b/kernel": kernel})
    assert not found.can_compare
    assert 'state_names = {"torch": {"a": "b"}}' in found.remedy


def test_initial_values_that_are_transposed_are_named():
    kernel = RANDOM.standard_normal((3, 3))
    (found,) = match({"model/a/kernel": kernel}, {"model/a/kernel": kernel.T}).findings
    assert (found.suspect, found.layer) == ("initial value", "a")
    assert "transposed" in found.text


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


@pytest.mark.parametrize(("rank", "speaks"), [(0, False), (1, False), (2, True), (3, False)])
def test_what_tensorflow_alone_raises_is_reported_by_its_leader(rank, speaks, monkeypatch):
    def fail(_layers, _role):
        raise TaskError("no", everywhere=True)

    monkeypatch.setattr(command, "parity_job", fail)
    environ = {"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": str(rank)}
    monkeypatch.setattr(command, "find_role", lambda: find_role(environ))
    with pytest.raises(TaskError) as caught:
        command.run_parity([], None)
    assert caught.value.everywhere is not speaks


@pytest.mark.parametrize(("left", "right", "said"), [
    ({"bias": np.full(8, -2.0)}, {"bias": np.zeros(8)}, ["starts from -2 in PyTorch and from 0 in"]),
    ({"bias": np.linspace(-0.3, 0.3, 8)}, {"bias": np.full(8, 0.1)}, ["and from 0.1 in TensorFlow"]),
    ({"bias": np.linspace(-0.4, 0.4, 8)}, {"bias": np.zeros(8)}, []),
    ({"gamma": np.ones(8)}, {"gamma": np.zeros(8)}, ["from 1 in PyTorch and from 0"]),
    ({}, {}, []),
])  # fmt: skip
def test_initializers_that_are_no_defaults_are_named(left, right, said):
    sides = []
    for seed, own in enumerate((left, right)):
        kernel = np.random.RandomState(seed).uniform(-0.4, 0.4, (6, 8))
        sides.append({f"model/dense/{name}": value for name, value in {"kernel": kernel, **own}.items()})
    found = list(different_beginnings(*sides))
    assert [text in one.text for one, text in zip(found, said, strict=True)] == [True] * len(said)


def test_masks_are_told_by_their_zeros_and_by_the_last_position():
    scores = np.random.RandomState(0).randn(2, 5, 5)
    open_to_all, causal = np.exp(scores), np.exp(scores) * np.tril(np.ones((5, 5)))
    assert mask_of(causal, open_to_all) == (0, "later positions (a causal mask)")
    causal[:, :, 0] = 0
    assert mask_of(open_to_all, causal) == (1, "60% of the positions")
    assert mask_of(open_to_all, open_to_all) is None
    other = open_to_all + 0.1
    assert not differs_but_at_the_end(open_to_all, other)
    other[:, -1] = open_to_all[:, -1]
    assert differs_but_at_the_end(open_to_all, other)
