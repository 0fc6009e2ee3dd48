"""Splits without a seed and data that differ between workers: an honest accuracy or an error."""

from pathlib import Path

import pytest
from support.jobs import FRAMEWORKS, temporary_folder
from support.pool import command, controller_of, train

TASKS = Path(__file__).with_name("noise_tasks.py")
HONEST = pytest.approx(0.5, abs=0.08)
SEEDED = {"torch": ["Sklearn", "Torch"], "tf": ["Sklearn", "TensorFlow"]}


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_split_without_a_seed_is_the_same_on_all_workers(framework):
    """One that differs is refused; one that leaks is learned by heart."""
    for task in SEEDED[framework]:
        words = ("--framework", framework, "--task", f"{TASKS}:{task}")
        run = train(2, controller_of(framework, 2), *words, cwd=temporary_folder())
        assert run.summary["final"]["accuracy"] == HONEST


def test_data_that_differ_are_refused_and_the_order_of_a_set_is_equal_or_refused(tmp_path):
    """It is equal under a horovodrun that hvdtrain built."""
    unseeded, of_set = (
        command(
            2, "mpi", "torch", "--framework", "torch", "--task", f"{TASKS}:{task}", "--check", cwd=tmp_path
        )
        for task in ("Unseeded", "SetOrder")
    )
    assert unseeded.returncode == 3
    assert "of the training data differs under 'inputs': one value on rank 0 (" in unseeded.stderr
    assert "another on rank 1 (" in unseeded.stderr
    assert "Seed a random split" in unseeded.stderr
    assert of_set.returncode == 0 or (of_set.returncode, "sort file names" in of_set.stderr) == (3, True)


def test_one_worker_that_resumes_and_evaluates(tmp_path):
    """A split that is seeded here continues; one with a generator of its own is refused."""

    def hvdtrain(*words: str, task: str, in_framework: str = "torch"):
        result = command(
            1, "none", in_framework, *words, "--framework", in_framework, "--task", f"{TASKS}:{task}",
            cwd=tmp_path,
        )  # fmt: skip
        return result.returncode, result.output

    assert hvdtrain("--run-dir", "a", "--epochs", "20", task="Sklearn")[0] == 0
    assert hvdtrain("--run-dir", "a", "--epochs", "21", "--resume", task="Sklearn")[0] == 0
    code, text = hvdtrain("evaluate", "a", task="Sklearn", in_framework="tf")
    assert code == 0, text
    assert float(text.partition("accuracy ")[2].split()[0]) == HONEST
    assert hvdtrain("--run-dir", "b", "--epochs", "1", task="Unseeded")[0] == 0
    code, text = hvdtrain("--run-dir", "b", "--epochs", "2", "--resume", task="Unseeded")
    assert code == 2
    assert "the training data changed since checkpoint" in text
    code, text = hvdtrain("evaluate", "b", task="Unseeded")
    assert code == 2
    assert "the evaluation data changed since checkpoint" in text
    code, text = hvdtrain("evaluate", "b", "--on-changed-data", "warn", task="Unseeded")
    assert code == 0, text
    assert "note: the evaluation data changed since checkpoint" in text
