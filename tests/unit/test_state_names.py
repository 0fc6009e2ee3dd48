"""Portable names: the task's ``state_names``, states that do not fit, and initial values by name."""

from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.backends.portable.initial_values import initial_value
from hvdtrain.backends.portable.names import Renaming, check_state, state_problems
from hvdtrain.errors import TaskError


def renaming(names, framework="torch"):
    return Renaming(SimpleNamespace(state_names=names), framework)


@pytest.mark.parametrize(
    ("own", "portable"),
    [
        ("features/0/kernel", "conv1/kernel"),
        ("features/01/kernel", "features/01/kernel"),
        ("features/1/bias", "rest/1/bias"),
        ("features/1/norm/gamma", "norm/gamma"),
        ("head/kernel", "out/weights"),
        ("wrapped/dense/bias", "dense/bias"),
    ],
)
def test_names_are_matched_on_whole_parts_and_the_longest_wins(own, portable):
    names = {
        "features.0": "conv1",
        "features": "rest",
        "features/01": "features.01",
        "features/1/norm": "norm",
        "head.kernel": "out/weights",
        "wrapped": "",
    }
    assert renaming({"torch": names})(own) == portable


@pytest.mark.parametrize("names", [{"pytorch": {}}, {"torch": {"a": 1}}])
def test_another_form_is_refused(names):
    with pytest.raises(TaskError, match="state_names maps 'torch' and 'tf' to mappings of text"):
        renaming(names)


def test_a_key_that_matches_nothing_is_refused_with_the_closest():
    with pytest.raises(TaskError) as caught:
        renaming({"torch": {"feature.0": "conv1"}}).check_used(["features/0/kernel", "head/bias"])
    assert caught.value.problem == "state_names['torch'] has 'feature.0', which the model does not have"
    assert "features/0" in caught.value.remedy


def test_a_missing_name_comes_with_the_closest_unexpected_ones():
    expected = {"model/features/0/kernel": (3, 3, 1, 8)}
    found = {
        "model/features/1/kernel": (3, 3, 8, 8),
        "model/conv1/kernel": (3, 3, 1, 8),
        "optimizer/momentum/features/0/kernel": (3, 3, 1, 8),
    }
    assert state_problems(expected, found)[0] == (
        "missing: model/features/0/kernel (3, 3, 1, 8); closest: model/conv1/kernel, model/features/1/kernel"
    )
    with pytest.raises(TaskError, match=r"missing: model/a (.|\n)*state_names"):
        check_state({"model/a": (2,)}, {"model/b": np.zeros(2)}, "torch")


def test_initial_values_are_pinned():
    """A change here makes every earlier run unrepeatable."""
    kernel = [
        [-0.8041489720344543, 0.859616219997406, 0.6866053342819214],
        [0.5369599461555481, -0.3574262857437134, -0.0913240909576416],
    ]
    assert initial_value("model/dense/kernel", (2, 3), 0).tolist() == kernel
    embeddings = [-0.03707254305481911, 0.039122872054576874]
    assert initial_value("model/e/embeddings", (2,), 5).tolist() == embeddings
    draws = [("model/a/kernel", 0), ("model/b/kernel", 0), ("model/a/kernel", 1)]
    assert len({initial_value(name, (2, 2), seed).tobytes() for name, seed in draws}) == 3
