"""Initial values of parameters: by portable name and seed alone."""

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


def test_values_depend_on_name_and_seed_alone():
    def draw(name: str = "model/a/kernel", seed: int = 0) -> list:
        return initial_value(name, (2, 2), seed).tolist()

    assert draw() == draw()
    assert draw() != draw(name="model/b/kernel")
    assert draw() != draw(seed=1)
