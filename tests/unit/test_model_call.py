"""How a model is called with a batch, and what is said if it does not take what the batch has."""

from functools import partial

import numpy as np
import pytest

from hvdtrain.backends.objective.model_call import ModelCall
from hvdtrain.errors import TaskError

A, B, Y = np.ones((2, 3)), np.zeros((2, 1)), np.arange(2)


class Model:
    """A model; what counts is the signature of ``forward`` in PyTorch, and of ``call`` in Keras."""

    def __init__(self, call) -> None:
        self.forward = self.call = call

    def __call__(self, *args, **kwargs):
        return self.call(*args, **kwargs)


def functional(*names: str, mapping: bool = False) -> Model:
    """A functional model: its inputs have names, and it takes a list or a mapping of them."""
    model = Model(lambda inputs, training=None, mask=None: inputs)
    model.inputs = [type("KerasTensor", (), {"name": name})() for name in names]
    model.input = dict(zip(names, model.inputs, strict=True)) if mapping else model.inputs
    return model


def called(framework: str, model, batch):
    return ModelCall(framework)(model, batch)[0]


def two(ids, mask=None, labels=None):
    return {"ids": ids, "mask": mask, "labels": labels}


def one(batch):
    return batch


MAPPING = {"inputs/ids": A, "inputs/mask": B, "targets": Y}
TUPLE = {"inputs/0": A, "inputs/1": B, "targets": Y}
COLUMNS = {"ids": A, "mask": B, "labels": Y}
BOTH = {"ids": A, "mask": B, "labels": None}


@pytest.mark.parametrize(
    ("framework", "model", "batch", "expected"),
    [
        ("torch", Model(one), {"inputs": A, "targets": Y}, A),
        ("torch", Model(two), MAPPING, BOTH),
        ("torch", Model(lambda **columns: columns), MAPPING, {"ids": A, "mask": B}),
        ("torch", Model(one), MAPPING, {"ids": A, "mask": B}),
        ("torch", Model(lambda a, b: (a, b)), TUPLE, (A, B)),
        ("torch", Model(two), COLUMNS, BOTH),
        ("torch", Model(lambda **columns: columns), {**COLUMNS, "weights": Y}, {"ids": A, "mask": B}),
        ("tf", Model(one), {"inputs": A}, A),
        ("tf", Model(lambda x, training=False: x), MAPPING, {"ids": A, "mask": B}),
        ("tf", Model(one), TUPLE, [A, B]),
        ("tf", functional("a", "b"), TUPLE, [A, B]),
        ("tf", functional("mask", "ids"), MAPPING, {"ids": A, "mask": B}),
        ("tf", functional("mask", "ids", mapping=True), COLUMNS, {"ids": A, "mask": B}),
        ("tf", functional("anything"), {"inputs": A}, A),
        ("tf", partial(functional("mask", "ids"), training=False), MAPPING, {"ids": A, "mask": B}),
    ],
)
def test_a_model_is_given_what_it_takes(framework, model, batch, expected):
    found = called(framework, model, batch)
    assert type(found) is type(expected)
    np.testing.assert_equal(found, expected)


@pytest.mark.parametrize(
    ("framework", "model", "batch", "said"),
    [
        ("torch", Model(two), {"inputs/ids": A, "inputs/maks": B}, r"'labels'\].*'maks'"),
        ("torch", Model(two), {"words": A, "labels": Y}, r"no 'inputs' .* have \['labels', 'words'\]"),
        ("torch", Model(two), {"mask": A, "labels": Y}, r"of which \['ids'\] must be given"),
        ("torch", Model(two), {"inputs": A, "mask": B}, r"takes \['mask'\] by name and the batch has them"),
        ("tf", functional("a", "b"), MAPPING, r"takes \['a', 'b'\].*has \['ids', 'mask'\]"),
        ("tf", functional("a", "b", "c"), TUPLE, "is a tuple of 2"),
        ("tf", functional("b", "a", mapping=True), TUPLE, r"takes \['b', 'a'\].*a tuple of 2"),
        ("tf", functional("ids", "mask"), {"inputs": A, "mask": B}, r"takes \['mask'\] by name"),
    ],
)
def test_what_a_model_does_not_take_is_named_by_every_worker(framework, model, batch, said):
    with pytest.raises(TaskError, match=said) as caught:
        called(framework, model, batch)
    assert caught.value.everywhere


@pytest.mark.parametrize("key", ["targets", "labels", "label"])
def test_labels_are_the_targets(key):
    batch = ModelCall("torch")(Model(one), {"inputs": A, key: Y})[1]
    assert batch["targets"] is Y
    assert batch[key] is Y
