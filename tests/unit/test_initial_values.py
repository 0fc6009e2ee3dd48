"""Initial values of parameters: by portable name and seed alone."""

import numpy as np
import pytest

from hvdtrain.backends.portable.initial_values import initial_value


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
    ("shape", "fan_in", "fan_out"), [((20, 30), 20, 30), ((3, 3, 8, 16), 72, 144), ((5, 8, 16), 40, 80)]
)
def test_kernels_are_glorot_uniform(shape, fan_in, fan_out):
    limit = np.sqrt(6 / (fan_in + fan_out))
    drawn = initial_value("model/a/kernel", shape, 0)
    assert 0.9 * limit < np.abs(drawn).max() <= limit
    assert abs(drawn.mean()) < 0.1 * limit
    assert drawn.std() == pytest.approx(limit / np.sqrt(3), rel=0.1)


@pytest.mark.parametrize("shape", [(4, 12), (12, 4), (5, 5)])
def test_recurrent_kernels_are_orthogonal(shape):
    drawn = initial_value("model/a/recurrent_kernel", shape, 0)
    product = drawn @ drawn.T if shape[0] <= shape[1] else drawn.T @ drawn
    np.testing.assert_allclose(product, np.eye(min(shape)), atol=1e-6)


def test_embeddings_lie_within_a_twentieth():
    drawn = initial_value("model/a/embeddings", (50, 8), 0)
    assert 0.045 < np.abs(drawn).max() <= 0.05


def test_values_depend_on_name_and_seed_alone():
    def draw(name: str = "model/a/kernel", seed: int = 0) -> list:
        return initial_value(name, (2, 2), seed).tolist()

    assert draw() == draw()
    assert draw() != draw(name="model/b/kernel")
    assert draw() != draw(seed=1)
