"""The examples with packages of others train with two workers, as their page shows, shortened."""

import importlib.util
import json
import math
import re
import shutil
import subprocess
import sys

import hugging_face_page
import numpy as np
import pytest
from support.documents import ROOT, hvdtrain_commands, named_files
from support.jobs import FRAMEWORKS, Result, Run, run
from support.pool import POOLS, Key, call, controller_of, framework_of
from support.resuming import notes
from support.torchvision_operators import install_torchvision

PAGE = ROOT / "docs" / "examples.md"
# the task of each command of the page, and to what it is shortened
SHORTENED = {
    "BertClassifier": ("--epochs", "1"),
    "MaskedLM": ("--steps", "10"),
    "MobileNet": ("--steps", "4"),
    "Pairs": ("--epochs", "1"),
    "Parcels": ("--epochs", "1"),
    "ResNet": ("--steps", "4"),
}
COMMANDS = {
    (words[words.index("--task") + 1].rpartition(":")[2], framework_of(tuple(words))): words
    for words in hvdtrain_commands(PAGE)
    if "--task" in words
}
REQUIRED = {"BertClassifier": "transformers", "MaskedLM": "transformers"}


@pytest.fixture
def folder(tmp_path):
    """A folder as a reader of the page has it: the examples, and a folder of pictures."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


@pytest.fixture(scope="session")
def torchvision(tmp_path_factory):
    """The folder of torchvision; empty if it is installed."""
    if importlib.util.find_spec("torchvision"):
        return ""
    folder = tmp_path_factory.mktemp("torchvision")
    try:
        install_torchvision(folder)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"torchvision is not installed, and pip cannot get it: {error}")
    return str(folder)


def check_installed(task):
    """Skip a test without the package that the example needs."""
    package = REQUIRED.get(task)
    if package and importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")


def trained(task, framework, folder, *options, torchvision=""):
    """Train an example in a pool, with the command of the page."""
    check_installed(task)
    words = COMMANDS[task, framework]
    assert words[:6] == ["horovodrun", "-np", "2", "python", "-m", "hvdtrain"]
    key = Key(framework, controller_of(framework, 2), 2)
    words = [*words[6:], *SHORTENED[task], "--log-every", "1", "--run-dir", "run", *options]
    function = "support.torchvision_operators:command_line_with_torchvision"
    done = call(key, function, folder, 200, words=words, torchvision=torchvision)
    if any(done.values):
        POOLS.drop(key)
    output = done.stdout + done.stderr
    assert done.values == [0, 0], output[-5000:]
    finished = Run(folder / "run", Result(0, done.stdout, done.stderr))
    assert finished.summary["workers"] == 2
    assert all(map(math.isfinite, [*finished.losses, finished.summary["final"]["loss"]]))
    return finished


def test_the_page_has_a_command_for_each_example_that_is_tried_here():
    assert {task for task, _ in COMMANDS} == set(SHORTENED)


def test_a_classifier_of_hugging_face_learns(folder):
    options = ("--learning-rate", "0.001", "--lr-schedule", "constant")
    done = trained("BertClassifier", "torch", folder, *options)
    assert done.summary["final"]["accuracy"] > 0.9
    assert notes(done) == []  # every column is used


def test_a_classifier_of_the_page_on_hugging_face(folder):
    """Its task trains on a table and resumes, and its script saves what was trained."""
    check_installed("BertClassifier")
    page = ROOT / "docs" / "hugging-face.md"
    for name, text in named_files(page).items():
        (folder / name).write_text(text, encoding="utf-8")
    key, case = Key("torch", "none", 1), hugging_face_page.__file__
    call(key, f"{case}:prepare", folder)
    train, resume, *_, export = (words[words.index("hvdtrain") + 1 :] for words in hvdtrain_commands(page))
    for words, steps in ((train, 2), (resume, 3)):
        words += ["--set", "task_options.model=saved", "--steps", str(steps), "--log-every", "1"]
        done = call(key, f"{case}:follow", folder, words=words)
        assert done.values == [0], (done.stdout + done.stderr)[-5000:]
        assert Run(folder / "runs" / "reviews", Result(0, done.stdout, done.stderr)).summary["steps"] == steps
    assert call(key, f"{case}:follow", folder, words=export).values == [0]
    weights = next((folder / "runs" / "reviews" / "exports").iterdir())
    assert call(key, f"{case}:save_trained", folder, weights=str(weights)).values == [0]


def test_a_classifier_takes_weights_and_tokenizer_from_a_folder(folder):
    check_installed("BertClassifier")
    call(Key("torch", "none", 1), f"{hugging_face_page.__file__}:save", folder)
    done = trained("BertClassifier", "torch", folder, "--set", "task_options.pretrained=saved")
    assert done.losses[0] > hugging_face_page.LEAST_LOSS


def test_a_masked_language_model_learns(folder):
    options = ("--lr-schedule", "constant", "--learning-rate", "0.003")
    losses = trained("MaskedLM", "torch", folder, *options).losses
    assert 6.5 < losses[0] < 7.5  # of some 1,100 tokens, none is more probable than others
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.parametrize(("task", "framework"), [("ResNet", "torch"), ("MobileNet", "tf")])
def test_models_of_others_train_on_an_image_folder(task, framework, folder, torchvision):
    drawing = run([sys.executable, "examples/image_folder.py", "shapes"], folder)
    assert drawing.returncode == 0, drawing.output
    trained(task, framework, folder, torchvision=torchvision if task == "ResNet" else "")


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_loss_over_the_global_batch_falls(framework, folder):
    losses = trained("Pairs", framework, folder).losses
    assert losses[-1] < losses[0]


def test_a_model_of_an_image_and_a_table_has_the_same_curve_in_both_frameworks(tmp_path):
    losses = []
    for framework in FRAMEWORKS:
        (tmp_path / framework).mkdir()
        shutil.copytree(ROOT / "examples", tmp_path / framework / "examples")
        losses.append(trained("Parcels", framework, tmp_path / framework).losses)
    assert losses[0][-1] < losses[0][0] / 2
    np.testing.assert_allclose(*losses, rtol=1e-4)


def test_a_trial_of_a_sweep_that_was_interrupted_continues_and_is_pruned(tmp_path):
    optuna = pytest.importorskip("optuna")
    folder = tmp_path / "sweeps" / "digits-torch"
    folder.mkdir(parents=True)
    study = optuna.create_study(
        study_name="sweep", storage=f"sqlite:///{folder}/study.db", direction="maximize"
    )
    for _ in range(5):  # the pruner needs five trials, which all were better after the first epoch
        study.add_trial(optuna.create_trial(value=0.5, intermediate_values={1: 1.0}))
    begun = study.ask()
    begun.suggest_float("learning_rate", 1e-3, 1.0, log=True)
    command = [sys.executable, ROOT / "examples" / "sweep.py", "torch", "--trials", "6"]
    for is_first in (True, False):  # the second time it has as many as it should
        result = run(command, tmp_path)
        assert result.returncode == 0, result.output[-5000:]
        assert ("trial 5: " in result.stdout) == is_first
        assert re.search(r"^ +5  PRUNED ", result.stdout, re.MULTILINE)
        assert "trial-0000/config.yaml" in result.stdout
    assert study.trials[5].state.name == "PRUNED"
    assert study.trials[5].params["learning_rate"] == begun.params["learning_rate"]
    summary = json.loads((folder / "trial-0005" / "summary.json").read_text())
    assert summary["status"] == "completed"
    assert summary["workers"] == 2
    assert 1 <= summary["epochs"] < 1.5
