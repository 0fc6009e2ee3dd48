"""``parity`` in one process: planted mistakes, each found in either framework; twins agree."""

import re
import runpy

import numpy as np
import pytest
from support.documents import ROOT
from support.parity import compared, observed
from support.parity_tasks import Normed, Pictures, Several, Unlike, Words
from support.states import make_record
from support.twins import keras, torch

from hvdtrain.checkpoints import storage
from hvdtrain.tools.parity.parity import conclusion, describe, to_document

# mistake, its task, what it is called, the layer that is named
MISTAKES = (
    ("epsilon", Words, "epsilon", "norm"),
    # in PyTorch it is a function, and the layer after it is named
    ("dropout left on", Words, "dropout left on", "narrow"),
    ("label shift", Words, "loss", "the loss"),
    ("padding", Pictures, "shape", "conv"),
    ("momentum", Pictures, "momentum convention", "norm"),
    ("initial value", Pictures, "initial value", "mix"),
)


@pytest.mark.parametrize(
    ("mistake", "task_class", "suspect", "layer"), MISTAKES, ids=[mistake[0] for mistake in MISTAKES]
)
def test_a_planted_mistake_is_found_and_its_layer_is_named(mistake, task_class, suspect, layer):
    result = compared(task_class, steps=1, task_options={"mistake": mistake})
    assert not result.has_parity
    assert result.is_wide
    causes = [(one.suspect, one.layer) for one in result.findings]
    assert len(causes) == 1, causes
    assert causes[0][0] == suspect
    assert layer in causes[0][1]
    assert layer in (result.divergence or layer)


def test_init_compares_with_the_weights_of_a_checkpoint(tmp_path):
    trained = observed("torch", Pictures, steps=1, seed=5).initial
    trained = {name: array.astype(np.float32) for name, array in trained.items() if name.startswith("model/")}
    path = storage.write(tmp_path / "checkpoints", trained, make_record())
    planted = {"mistake": "initial value"}
    for framework in ("torch", "tf"):
        initial = observed(framework, Pictures, steps=1, init=str(path), task_options=planted).initial
        assert all((initial[name] == trained[name]).all() for name in trained), framework
    result = compared(Pictures, steps=1, init=str(path), task_options=planted)
    assert result.has_parity, "it is not the model's own"


@pytest.mark.parametrize("task_class", [Words, Pictures])
def test_twins_have_parity_and_what_differs_is_rounding(task_class):
    result = compared(task_class, steps=3)
    assert result.has_parity, result.findings
    assert "in fp64: this is rounding" in conclusion(result)[0]
    assert "made equal beforehand: the initial values of" in result.notes[0]
    assert float(to_document(result)["layers"][-1]["outputs"]) < 1e-7
    # the frameworks are as they were
    assert torch.get_default_dtype() == torch.float32
    assert keras.config.floatx() == "float32"


def test_spatial_dropout_is_off_and_other_dropout_makes_training_random():
    result = compared(Normed)
    assert result.has_parity, result.findings
    assert "dropout (rates 0.2) is off" in describe(result, "Normed")
    (found,) = compared(Normed, steps=1, task_options={"mistake": "function"}).findings
    assert found.suspect == "random numbers in training"


def test_outputs_of_a_dictionary_are_paired_by_key_and_a_cast_to_fp32_is_rounding():
    result = compared(Several)
    assert result.has_parity, result.findings
    (found,) = compared(Several, task_options={"mistake": "second output"}).findings
    assert found.layer == "between a and the model's outputs"
    assert "PyTorch's numbers are 0.5 times TensorFlow's" in found.text


def test_models_with_other_names_are_listed_and_not_compared():
    result = compared(Unlike)
    assert not result.has_parity
    shapes = {name: (left, right) for name, left, right in result.unmatched}
    assert shapes["words/embeddings"] == (None, (12, 16))
    assert shapes["logits/kernel"] == ((16, 12), (16, 13))
    assert "not compared" in describe(result, "Unlike")


PORT = runpy.run_path(str(ROOT / "examples" / "port_a_model" / "digit_port.py"))
STAGES = {"Naive": "unknown", "Padded": "layout", "Permuted": "unknown", "Done": ""}


@pytest.mark.parametrize("stage", STAGES)
def test_the_example_has_one_mistake_less_at_each_stage(stage):
    result = compared(PORT[stage], steps=1)
    assert [one.suspect for one in result.findings] == ([STAGES[stage]] if STAGES[stage] else [])
    page = (ROOT / "examples" / "port_a_model" / "README.md").read_text()
    for line in conclusion(result):  # as the page shows it, up to its first number
        start = re.split(r"\d\.\de|: both|; Keras", line)[0]
        assert start in page or line.startswith("no parity")
