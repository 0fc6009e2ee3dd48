"""``parity`` in one process: ten planted mistakes, each found in either framework; built-in models agree."""

import re
import runpy

import pytest
from support.documents import ROOT
from support.parity import compared, side_of
from support.parity_small_tasks import Normed, Several
from support.parity_tasks import Pictures, Unlike, Words
from support.states import make_record
from support.twins import keras

from hvdtrain.checkpoints import storage
from hvdtrain.tools.parity.command import conclusion, to_document
from hvdtrain.tools.parity.rows import FP64

# mistake, where it is, its task, what it is called, the layer that is named
MISTAKES = (
    ("epsilon", "tf", Words, "epsilon", "norm"),
    ("GELU form", "torch", Words, "GELU form", "wide"),
    ("attention scale", "tf", Words, "attention scale", "qkv"),
    # in PyTorch it is a function, and the layer after it is named
    ("dropout left on", "torch", Words, "dropout left on", "narrow"),
    ("dropout left on", "tf", Words, "dropout left on", "dropout"),
    ("label shift", "tf", Words, "label shift", "the loss"),
    ("padding", "torch", Pictures, "padding", "conv"),
    ("padding", "tf", Pictures, "padding", "conv"),
    ("momentum", "torch", Pictures, "momentum convention", "norm"),
    ("missing bias", "tf", Pictures, "missing bias", "hidden"),
    ("transposed kernel", "torch", Pictures, "transposed kernel", "mix"),
    ("initial value", "tf", Pictures, "initial value", "mix"),
)


def found_in(task_class, steps=1, **options):
    return compared(task_class, steps=steps, **options)


@pytest.mark.parametrize(
    ("mistake", "side", "task_class", "suspect", "layer"),
    MISTAKES,
    ids=[f"{m[0]} in {m[1]}" for m in MISTAKES],
)
def test_a_planted_mistake_is_found_and_its_layer_is_named(mistake, side, task_class, suspect, layer):
    result = found_in(task_class, task_options={"mistake": mistake, "side": side})
    assert not result.has_parity
    causes = [(one.suspect, one.layer) for one in result.verdict.findings]
    assert len(causes) == 1, causes
    assert causes[0][0] == suspect
    assert layer in causes[0][1]
    if result.verdict.divergence:
        assert layer in result.verdict.divergence
        assert "it remains in fp64: this is no rounding" in conclusion(result.verdict)


def test_init_compares_with_the_weights_of_a_checkpoint(tmp_path):
    trained = side_of("torch", Pictures, steps=1, seed=5).backend.gather_state().read()
    path = storage.write(tmp_path / "checkpoints", trained, make_record())
    planted = {"mistake": "initial value", "side": "tf"}
    for framework in ("torch", "tf"):
        initial = side_of(framework, Pictures, steps=1, init=str(path), task_options=planted).initial()
        assert all((initial[name] == trained[name]).all() for name in initial), framework
    assert found_in(Pictures, init=str(path), task_options=planted).has_parity, "it is not the model's own"


@pytest.mark.parametrize("task_class", [Words, Pictures])
def test_twins_have_parity_and_what_differs_is_rounding(task_class):
    result = found_in(task_class, steps=10)
    assert result.has_parity, result.verdict.findings
    assert result.verdict.limits == FP64
    assert "this is rounding" in conclusion(result.verdict)[0]
    document = to_document(result)
    assert [step["step"] for step in document["steps"]] == [1, 10]
    usual, wide = (part["layers"][-1]["outputs"]["relative"] for part in (document, document["fp64"]))
    assert wide < 1e-2 * usual


def test_large_batches_have_parity_after_100_steps_and_spatial_dropout_is_off():
    result = compared(Normed)
    assert result.has_parity, result.verdict.findings
    assert [row.step for row in result.verdict.usual.steps] == [1, 10, 100]
    assert "dropout (rates 0.2) is off" in " ".join(result.verdict.notes)
    assert "here n = 2,304" in " ".join(result.verdict.notes)


def test_dropout_that_is_no_layer_makes_training_random():
    (found,) = compared(Normed, steps=1, task_options={"mistake": "function"}).verdict.findings
    assert found.suspect == "random numbers in training"
    assert "PyTorch's loss differs between two passes" in found.text


def test_outputs_of_a_dictionary_are_paired_by_key_and_a_cast_to_fp32_is_rounding():
    result = compared(Several)
    assert result.has_parity, result.verdict.findings
    assert "norm in PyTorch computes in fp32" in " ".join(result.verdict.notes)
    (found,) = compared(Several, task_options={"mistake": "second output"}).verdict.findings
    assert found.layer == "between a and the model's outputs"
    assert "after a, PyTorch computes no activation, TensorFlow something else" in found.text


def test_models_with_other_names_are_listed_and_not_compared():
    result = compared(Unlike)
    assert not result.has_parity
    assert result.verdict is None
    shapes = {one.name: (one.left, one.right) for one in result.match.unmatched}
    assert shapes["words/embeddings"] == (None, (12, 16))
    assert shapes["logits/kernel"] == ((16, 12), (16, 13))


def test_fp64_leaves_the_frameworks_as_they_were():
    import torch

    assert torch.get_default_dtype() == torch.float32
    assert keras.config.floatx() == "float32"


PORT = runpy.run_path(str(ROOT / "examples" / "port_a_model" / "digit_port.py"))
STAGES = {"Naive": "padding", "Padded": "layout", "Permuted": "GELU form", "Done": ""}


@pytest.mark.parametrize("stage", STAGES)
def test_the_example_has_one_mistake_less_at_each_stage(stage):
    result = found_in(PORT[stage])
    assert [one.suspect for one in result.verdict.findings] == ([STAGES[stage]] if STAGES[stage] else [])
    page = (ROOT / "examples" / "port_a_model" / "README.md").read_text()
    for line in conclusion(result.verdict):  # as the page shows it, up to its first number
        start = re.split(r"\d\.\de|: both|; Keras", line)[0]
        assert start in page or "it remains in fp64" in line or line.startswith("no parity")
