"""Programs without a framework: the calls that they make, their names, axes and comparisons."""

from collections import namedtuple
from types import SimpleNamespace

import numpy as np
import pytest

from hvdtrain.backends.objective.model_call import Serving, Tensors, named_outputs
from hvdtrain.backends.portable.program import Written, make_program, write_and_compare
from hvdtrain.errors import TaskError

NUMPY = Tensors(lambda value: isinstance(value, np.ndarray), np.asarray, lambda batch: batch, "torch_serve")
SIZES = (4, 2, 1)


def array(size, *axes, dtype="float32"):
    return np.arange(size * int(np.prod(axes)), dtype=dtype).reshape(size, *axes) + 1


def batches_of(**axes):
    return [{name: array(size, *shape) for name, shape in axes.items()} for size in SIZES]


def program(served, batches=None, is_model_call=False):
    return make_program(served, batches or batches_of(inputs=(3,), targets=()), NUMPY, is_model_call)


def check(made, run=None):
    """Compare a program with its model, as if it had been written."""
    run = run or (lambda tensors: made.named(made(tensors)))
    return write_and_compare(made, lambda _, inputs: Written(run, inputs))


def test_the_model_called_on_inputs_is_a_plain_program():
    made = program(lambda batch: 2 * batch["inputs"], is_model_call=True)
    assert made.is_plain
    assert [one.name for one in made.inputs] == ["inputs"]
    done = check(made)
    assert (done.inputs, done.outputs) == (("inputs float32 (batch, 3)",), ("outputs (batch, 3)",))
    assert (done.difference, done.notes) == (0.0, ())


def test_what_is_read_of_the_batch_are_the_inputs_and_there_are_no_labels():
    def served(batch):
        assert "labels" not in batch
        return {"sum": batch["a"] + batch["inputs"]["b"] + batch["inputs"]["c"]}

    shapes = dict.fromkeys(("other", "inputs/b", "inputs/c", "a", "labels/0"), (6,))
    made = program(served, batches_of(**shapes))
    assert not made.is_plain
    assert [one.name for one in made.inputs] == ["a", "b", "c"]
    assert check(made).outputs == ("sum (batch, 6)",)
    batches = batches_of(**{"inputs/0": (2,), "inputs/1": (2,), "a": (2,)})
    made = program(lambda batch: sum(batch["inputs"]) + batch["a"], batches)
    assert [one.name for one in made.inputs] == ["inputs_0", "inputs_1", "a"]


@pytest.mark.parametrize("other", [array(2, 3, 1), array(2, 3, dtype="int64")], ids=["axes", "type"])
def test_axes_whose_length_differs_are_dynamic_and_an_input_of_another_kind_is_refused(other):
    batches = [{"x": array(size, n, 5)} for size, n in ((4, 7), (4, 6), (2, 7))]
    assert check(program(lambda batch: 2 * batch["x"], batches)).inputs == ("x float32 (batch, length, 5)",)
    with pytest.raises(TaskError, match="'inputs' of the model has different types or numbers of axes"):
        program(lambda batch: batch["inputs"], [{"inputs": array(4, 3)}, {"inputs": other}])


@pytest.mark.parametrize(
    ("served", "said"),
    [
        (lambda batch: str(batch["inputs"]), "returns no tensor, but a str(.|\n)*torch_serve"),
        (lambda batch: np.ones(3), "called without a tensor"),
        (lambda batch: batch["inputs"] + np.random.rand(), "called twice with one batch"),
    ],
)
def test_a_call_that_a_program_cannot_make_is_refused(served, said):
    with pytest.raises(TaskError, match=said):
        program(served)


def test_the_model_is_called_as_for_a_named_loss_and_other_losses_need_a_method():
    served = Serving(SimpleNamespace(loss="mse"), "torch", None)
    batch = {"inputs": array(2, 3), "labels": array(2)}
    assert served.predicted(lambda inputs: 2 * inputs, batch, NUMPY)["outputs"].sum() == 42
    own = SimpleNamespace(loss="mse", torch_loss=lambda model, batch: (model(batch["inputs"]).sum(1), {}))
    with pytest.raises(TaskError, match=r"torch_serve\(model, batch\), which returns"):
        Serving(own, "torch", own.torch_loss).predicted(np.copy, batch, NUMPY)
    (losses,) = Serving(own, "torch", own.torch_loss).arrays(np.copy, batch, NUMPY)
    assert list(losses) == [6, 15]
    own.torch_serve = lambda model, batch: {"all": model(batch["inputs"])}
    assert list(Serving(own, "torch", None).predicted(np.copy, batch, NUMPY)) == ["all"]


@pytest.mark.parametrize(
    ("outputs", "names", "ignored"),
    [
        (array(1), ["outputs"], ()),
        ({"z": array(1), "a": (array(1), None)}, ["z", "a_0"], ()),
        (namedtuple("Pair", "mean count")(array(1), 3), ["mean"], ("count (a int)",)),
        ({"inputs": array(1), "a b": array(1), "a_b": array(1)}, ["inputs_output", "a_b", "a_b_"], ()),
        ({"class": array(1), "1": array(1)}, ["class_", "_1"], ()),
    ],
)
def test_outputs_have_the_names_of_their_keys(outputs, names, ignored):
    found, left = named_outputs(outputs, NUMPY, ["inputs"])
    assert (list(found), left) == (names, ignored)


@pytest.mark.parametrize(
    ("is_wrong", "batch", "checked"),
    [
        (lambda x: x.shape[1] == 3, "any batch size, sequences of 6 only", "batches of 4, 2 and 1"),
        (lambda x: len(x) != 4, "batches of 4 only, sequences of 6 only", "batches of 4 of"),
    ],
)
def test_a_program_that_is_wrong_for_other_sizes_gets_fixed_ones(is_wrong, batch, checked):
    made = program(lambda batch: 2 * batch["x"], [{"x": array(size, 6, dtype="int64")} for size in SIZES])
    assert check(made).checked.endswith("lengths 6 and 3")
    done = check(made, lambda tensors: {"outputs": 2 * tensors["x"] + is_wrong(tensors["x"])})
    assert (done.batch, done.difference) == (batch, 0.0)
    assert done.checked.startswith(checked)
