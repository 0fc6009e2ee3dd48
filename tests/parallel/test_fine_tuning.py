"""Fine-tuning: a new head on a backbone from another job by --init, as in the example; parameter groups."""

import functools
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from support.documents import ROOT, hvdtrain_commands
from support.jobs import FRAMEWORKS, Run, temporary_folder
from support.pool import controller_of, train
from support.resuming import TASKS, said
from support.serving import hvdtrain

EXAMPLE = ROOT / "examples" / "fine_tuning.py"


def documented(number: int) -> list[str]:
    """Return the options of a job of the page, without its folder for the run."""
    words = hvdtrain_commands(ROOT / "docs" / "fine-tuning.md")[number]
    assert words[:6] == ["horovodrun", "-np", "2", "python", "-m", "hvdtrain"]
    return list(takewhile(lambda word: word != "--run-dir", words[6:]))


def job(number: int, framework: str, **values: str) -> Run:
    """Train a documented job with two workers, with other values of some of its options."""
    words = documented(number)
    for option, value in {"framework": framework, **values}.items():
        words[words.index(f"--{option}") + 1] = value
    path = words.index("--task") + 1
    words[path] = str(ROOT / words[path])
    return train(2, controller_of(framework, 2), *words, "--log-every", "1", cwd=temporary_folder())


@functools.cache
def trained_low(framework: str) -> Run:
    return job(0, framework)


@functools.cache
def tuned(source: str, framework: str) -> Run:
    return job(1, framework, init=str(trained_low(source).folder))


def weights(run: Run, step: int = 0, part: str = "model") -> dict[str, np.ndarray]:
    """Return a part of the checkpoint of a step, or of the last one."""
    newest = Path(run.summary["checkpoint"])
    return load_file((newest.with_name(f"step-{step:08d}") if step else newest) / f"{part}.safetensors")


@pytest.mark.parametrize(("source", "framework"), [("torch", "torch"), ("torch", "tf")])
def test_the_backbone_is_taken_and_the_head_is_new(source, framework):
    run, before = tuned(source, framework), weights(trained_low(source))
    assert run.summary["final"]["accuracy"] >= 0.87
    after = weights(run)
    same = {name for name in after if np.array_equal(before[name], after[name])}
    assert same == {"model/conv1/kernel", "model/conv1/bias"}
    assert (before["model/dense2/bias"].shape, after["model/dense2/bias"].shape) == ((5,), (10,))
    text = said(run)
    assert "weights 6 of 8 arrays taken, 150,016 of 151,306 numbers" in text
    assert "initial model/dense2/bias (10,): --init-skip 'model/dense2/*'; there (5,)" in text


def test_both_frameworks_tune_alike_from_one_checkpoint():
    np.testing.assert_allclose(
        tuned("torch", "tf").losses[:40], tuned("torch", "torch").losses[:40], rtol=1e-3
    )


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_without_options_the_head_is_refused_and_an_exported_file_of_it_too(framework):
    low, folder = str(trained_low(framework).folder), temporary_folder()
    file = folder / {"torch": "low.pt", "tf": "low.keras"}[framework]
    few = ("--task", f"{EXAMPLE}:FewDigits")
    words = ["import", str(file), *few, "--output", str(folder / "imported")]
    refused, exported, imported = hvdtrain(
        ["--framework", framework, *few, "--init", low, "--steps", "1"],
        ["export", low, "--to", file.suffix[1:], "--task", f"{EXAMPLE}:LowDigits", "--output", str(file)],
        words,
        cwd=folder,
        framework=framework,
    )
    assert "misshapen: model/dense2/kernel must be (128, 10), is (128, 5)" in refused[1]
    assert "--init-skip PATTERN" in refused[1]
    assert exported[1] == ""
    assert "--init-skip then takes a part of the checkpoint" in imported[1]


GROUPS = (
    "parameter_groups=[{match: '*/0/kernel', frozen: true}, "
    "{match: model/0/*, learning_rate_factor: 0.1, weight_decay: 0}]"
)
OPTIONS = ("--task", f"{TASKS}:Fit", "--steps", "8", "--global-batch-size", "8", "--save-every", "4")


def trained(framework: str, workers: int, *options: str) -> Run:
    words = ("--framework", framework, *OPTIONS, "--set", GROUPS, *options)
    return train(workers, controller_of(framework, workers), *words, cwd=temporary_folder())


def test_groups_train_alike_in_both_frameworks_and_when_resumed_in_the_other():
    whole, other = trained("torch", 2), trained("tf", 2)
    np.testing.assert_allclose(whole.losses, other.losses, rtol=1e-4)
    line = "groups         */0/kernel (1): frozen; model/0/* (1): learning rate x 0.1 and weight decay 0"
    assert line in other.result.stdout
    resumed = trained("tf", 1, "--resume", str(whole.folder / "checkpoints" / "step-00000004"))
    np.testing.assert_allclose(resumed.losses, whole.losses[4:], rtol=1e-4)
    before, after = weights(whole, 4), weights(resumed)
    same = {name for name, value in before.items() if (value == after[name]).all()}
    assert same == {"model/0/kernel"}
    assert not any(name.endswith("/0/kernel") for name in weights(whole, part="optimizer"))
