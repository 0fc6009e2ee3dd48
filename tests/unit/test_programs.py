"""Programs without a framework: which calls of a model they can make, their names, axes and comparisons."""

import inspect
from collections import namedtuple
from dataclasses import dataclass

import numpy as np
import pytest

from hvdtrain.backends.portable.program import Written, make_program, write_and_compare
from hvdtrain.backends.portable.recording import Call, ModelCalls, Recording, Tensors, named_outputs
from hvdtrain.errors import TaskError

NUMPY = Tensors(lambda value: isinstance(value, np.ndarray), np.asarray)
CALLS = ModelCalls(NUMPY, "__call__", lambda model: model, None, None, "")
SIZES = (4, 2, 1)


def array(size, *axes, dtype="float32"):
    return np.arange(size * int(np.prod(axes)), dtype=dtype).reshape(size, *axes) + 1


def recording(model, loss, batch, elsewhere=()):
    calls = []

    def watched(*args, **kwargs):
        outputs = model(*args, **kwargs)
        calls.append(Call(args, kwargs, outputs))
        return outputs

    loss(watched, batch)
    return Recording(batch, len(next(iter(batch.values()))), calls, elsewhere)


def program(model, loss, batches=None, elsewhere=()):
    if batches is None:
        batches = [{"inputs": array(size, 3), "targets": array(size)} for size in SIZES]
    recordings = [recording(model, loss, batch, elsewhere) for batch in batches]
    return make_program(recordings, model, inspect.signature(model), NUMPY, "Give it another loss.")


def check(made, model, run=None, write=None):
    """Compare a program with its model, as if it had been written."""

    def run_model(tensors):
        return made.named(made(model, tensors), NUMPY)

    written = write or (lambda inputs: Written(run or run_model, inputs))
    return write_and_compare(made, model, NUMPY, written)


def double(x):
    return 2 * x


def masked(ids, mask=None, scale=1.0, labels=None):
    return {"logits": scale * ids * (1 if mask is None else mask), "labels_seen": labels}


def test_the_model_called_on_inputs_is_a_plain_program():
    made = program(double, lambda model, batch: model(batch["inputs"]))
    assert made.is_plain
    assert [one.name for one in made.inputs] == ["inputs"]
    done = check(made, double)
    assert (done.batch, done.inputs) == ("any batch size", ("inputs float32 (batch, 3)",))
    assert done.outputs == ("outputs (batch, 3)",)
    assert done.checked == "batches of 4, 2 and 1 of the task's data"
    assert (done.difference, done.notes) == (0.0, ())


def test_all_tensors_are_inputs_by_the_names_of_the_batch_and_constants_stay():
    batches = [{"a": array(size, 6, dtype="int64"), "b": array(size, 6)} for size in SIZES]
    made = program(masked, lambda model, batch: model(batch["a"], mask=batch["b"], scale=0.5), batches)
    assert not made.is_plain
    assert made.arguments.values["scale"] == 0.5
    done = check(made, masked)
    assert done.inputs == ("a int64 (batch, length)", "b float32 (batch, length)")
    assert done.outputs == ("logits (batch, length)",)
    assert done.batch == "any batch size, any length"
    assert done.checked.endswith("lengths 6 and 3")


def test_what_the_loss_computes_has_the_name_of_the_parameter():
    made = program(double, lambda model, batch: model(batch["inputs"] / 255))
    assert [(one.name, one.is_computed) for one in made.inputs] == [("x", True)]
    assert check(made, double).notes == (
        "x: computed by the task's loss from the batch, before it calls the model",
    )


def test_axes_whose_length_differs_between_batches_are_dynamic():
    batches = [{"x": array(size, n, 5)} for size, n in ((4, 7), (4, 6), (2, 7))]
    done = check(program(double, lambda model, batch: model(batch["x"]), batches), double)
    assert done.inputs == ("x float32 (batch, length, 5)",)


def test_a_length_that_is_a_constant_of_the_call_is_fixed():
    def first(x, count):
        return x[:, :count]

    batches = [{"x": array(size, 6, dtype="int64")} for size in SIZES]
    made = program(first, lambda model, batch: model(batch["x"], batch["x"].shape[1]), batches)
    assert check(made, first).inputs == ("x int64 (batch, 6)",)


def test_labels_are_left_out_if_the_model_has_a_default_for_them():
    def loss(model, batch):
        return model(batch["inputs"], labels=batch["targets"])

    made = program(masked, loss)
    assert [one.name for one in made.inputs] == ["inputs"]
    assert made.arguments.left_out == ("'labels'",)
    assert check(made, masked).notes == ("without 'labels', which training gives the model",)


def needs_labels(x, y):
    return x + y[:, None]


def changed_by_labels(x, labels=None):
    return x if labels is None else x + labels[:, None]


def sized(x, size=1):
    return x / size


class Changing:
    """A model that returns something else each time."""

    __name__ = "changing"

    def __init__(self):
        self.calls = 0

    def __call__(self, x):
        self.calls += 1
        return x + self.calls


def no_tensor(x):
    return str(x)


@pytest.mark.parametrize(
    ("model", "loss", "said"),
    [
        (double, lambda model, batch: None, "the task's loss does not call the model"),
        (
            double,
            lambda model, batch: [model(batch["inputs"])] * 2 + [model(batch["targets"])],
            "calls the model 2 times for one batch",
        ),
        (needs_labels, lambda model, batch: model(batch["inputs"], batch["targets"]), "'y' has no default"),
        (
            changed_by_labels,
            lambda model, batch: model(batch["inputs"], batch["targets"]),
            "without 'labels'.* output 'outputs' differs from that in training",
        ),
        (
            sized,
            lambda model, batch: model(batch["inputs"], size=len(batch["inputs"])),
            "differently for different batches: 'size' is 4 and 2",
        ),
        (
            sized,
            lambda model, batch: model(batch["inputs"], np.float32(3)),
            "with 'size', a float32, which can be no input",
        ),
        (
            masked,
            lambda model, batch: model(
                batch["inputs"], batch["inputs"] if len(batch["inputs"]) > 1 else None
            ),
            "differently for different batches: 'mask' is the tensor inputs and None",
        ),
        (no_tensor, lambda model, batch: model(batch["inputs"]), "returns no tensor, but a str"),
        (lambda: 1, lambda model, batch: model(), "calls the model without a tensor"),
        (Changing(), lambda model, batch: model(batch["inputs"]), "called twice with one batch"),
    ],
)
def test_a_call_that_a_program_cannot_make_is_refused(model, loss, said):
    with pytest.raises(TaskError, match=said):
        program(model, loss)


def test_parts_of_the_model_that_are_used_besides_are_refused():
    with pytest.raises(TaskError, match="uses its head besides"):
        program(double, lambda model, batch: model(batch["inputs"]), elsewhere=["head", "head"])


def test_a_function_for_serving_takes_what_it_reads_and_gets_no_labels():
    def serve(model, batch):
        assert "targets" not in batch
        return {"sum": model(batch["a"]) + batch.get("b")}

    def served(batch):
        return serve(double, batch)

    recordings = []
    for size in SIZES:
        batch = {name: array(size, 3) for name in ("a", "other", "b", "targets")}
        recordings.append(CALLS.recorded(double, None, batch, serve))
    made = make_program(recordings, served, inspect.signature(served), NUMPY, "")
    assert [one.name for one in made.inputs] == ["a", "b"]
    assert check(made, served).outputs == ("sum (batch, 3)",)


Pair = namedtuple("Pair", ["mean", "spread"])


@dataclass
class Result:
    logits: np.ndarray
    loss: None = None
    state: object = 3


@pytest.mark.parametrize(
    ("outputs", "names", "ignored"),
    [
        (array(1), ["outputs"], ()),
        ((array(1), array(1)), ["outputs_0", "outputs_1"], ()),
        ({"z": array(1), "a": (array(1), None)}, ["z", "a_0"], ()),
        (Pair(array(1), array(1)), ["mean", "spread"], ()),
        (Result(array(1)), ["logits"], ("state (a int)",)),
        ({"inputs": array(1), "a b": array(1), "a_b": array(1)}, ["inputs_output", "a_b", "a_b_"], ()),
        ({"class": array(1), "1": array(1)}, ["class_", "_1"], ()),
    ],
)
def test_outputs_have_the_names_of_their_keys(outputs, names, ignored):
    found, left = named_outputs(outputs, NUMPY, ["inputs"])
    assert (list(found), left) == (names, ignored)


def token_program():
    batches = [{"x": array(size, 6, dtype="int64")} for size in SIZES]
    return program(double, lambda model, batch: model(batch["x"]), batches)


def test_a_program_that_is_wrong_for_another_length_gets_a_fixed_one():
    made = token_program()

    def run(tensors):
        x = tensors["x"]
        return {"outputs": double(x) + (x.shape[1] == 3)}

    done = check(made, double, run)
    assert (done.batch, done.difference) == ("any batch size, sequences of 6 only", 0.0)
    assert done.inputs == ("x int64 (batch, 6)",)


def test_a_program_that_is_wrong_for_other_batch_sizes_gets_a_fixed_one():
    def run(tensors):
        return {"outputs": double(tensors["x"]) + (len(tensors["x"]) != 4)}

    done = check(token_program(), double, run)
    assert (done.batch, done.checked) == (
        "batches of 4 only, sequences of 6 only",
        "batches of 4 of the task's data",
    )
