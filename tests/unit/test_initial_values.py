"""The portable state's rules: initial values by name, and what is said where a state does not fit."""

import numpy as np
import pytest

from hvdtrain.backends.base import initial_value, state_problems


def test_initial_values_are_pinned():
    """A change here makes every earlier run unrepeatable."""
    kernel = [
        [-0.8041489720344543, 0.859616219997406, 0.6866053342819214],
        [0.5369599461555481, -0.3574262857437134, -0.0913240909576416],
    ]
    assert initial_value("model/dense/kernel", (2, 3), 0).tolist() == kernel
    embeddings = [-0.03707254305481911, 0.039122872054576874]
    assert initial_value("model/e/embeddings", (2,), 5).tolist() == embeddings


@pytest.mark.parametrize(
    ("role", "value"), [("bias", 0), ("beta", 0), ("moving_mean", 0), ("gamma", 1), ("moving_variance", 1)]
)
def test_some_roles_start_at_a_constant(role, value):
    assert initial_value(f"model/a/{role}", (3,), 0).tolist() == [value] * 3


@pytest.mark.parametrize(
    ("shape", "fan_in", "fan_out"), [((20, 30), 20, 30), ((3, 3, 8, 16), 72, 144), ((5, 8, 16), 40, 80)]
)
def test_kernels_are_glorot_uniform(shape, fan_in, fan_out):
    limit = np.sqrt(6 / (fan_in + fan_out))
    drawn = initial_value("model/a/kernel", shape, 0)
    assert 0.9 * limit < np.abs(drawn).max() <= limit
    assert abs(drawn.mean()) < 0.1 * limit
    assert drawn.std() == pytest.approx(limit / np.sqrt(3), rel=0.1)


def test_embeddings_lie_within_a_twentieth():
    drawn = initial_value("model/a/embeddings", (50, 8), 0)
    assert 0.045 < np.abs(drawn).max() <= 0.05


@pytest.mark.parametrize(
    ("name", "shape"), [("model/a/scale", (3,)), ("model/kernels", (3, 3)), ("model/a/kernel", (3,))]
)
def test_other_roles_keep_their_models_value(name, shape):
    assert initial_value(name, shape, 0) is None


def test_values_depend_on_name_and_seed_alone():
    def draw(name: str = "model/a/kernel", seed: int = 0) -> list:
        return initial_value(name, (2, 2), seed).tolist()

    assert draw() == draw()
    assert draw() != draw(name="model/b/kernel")
    assert draw() != draw(seed=1)


@pytest.mark.parametrize("role", ["kernel", "bias", "gamma", "embeddings"])
def test_values_are_float32_of_the_shape(role):
    drawn = initial_value(f"model/a/{role}", (2, 3), 0)
    assert (drawn.dtype, drawn.shape) == (np.float32, (2, 3))


def test_a_state_that_fits_has_no_problems():
    state = {"a": np.zeros((2, 3)), "b": np.zeros(())}
    assert state_problems(state, dict(state)) == []


def test_every_problem_of_a_state_is_named():
    expected = {"gone": np.zeros(2), "bent": np.zeros((2, 3)), "fine": np.zeros(1)}
    found = {"new": np.zeros(4), "bent": np.zeros((3, 2)), "fine": np.ones(1)}
    assert state_problems(expected, found) == [
        "missing: gone (2,)",
        "unexpected: new (4,)",
        "misshapen: bent must be (2, 3), is (3, 2)",
    ]
