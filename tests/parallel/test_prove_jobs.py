"""``prove`` over both controllers, of a task that is right and of some that are not; and ``parity``."""

import json

import pytest
from support.documents import ROOT
from support.jobs import launcher, run

ZOO, PROVED = "tests/conformance/models", "proved: what could be compared is equal"
# task, framework, how it is launched (or it launches two workers itself), what differs first, what is said
OWN = "tests/support/prove_tasks.py"
CASES = {
    "right": ("examples/tumors.py:Tumors", "tf", "gloo", "", PROVED),
    "own step": (f"{OWN}:Stepping", "torch", "", "", "the task has its own training step"),
    "forgotten": (f"{OWN}:Forgetful", "torch", "", "step 1, ", "what no checkpoint has"),
    "queue": (f"{ZOO}/state.py:Queue", "torch", "mpi", "step 1, queue", "buffer 'queue' is each worker's"),
    "masks": (f"{OWN}:Unmasked", "tf", "", "step 1, the loss", "a plain loop"),
}


@pytest.mark.parametrize("case", CASES)
def test_a_task_is_proved_or_what_differs_is_named(case, tmp_path, monkeypatch):
    task, framework, controller, place, text = CASES[case]
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT}")
    start = launcher(2, controller) if controller else []
    words = ("--framework", framework, "--task", f"{ROOT}/{task}", "--steps", "4", "--json", "found.json")
    result = run([*start, "python", "-m", "hvdtrain", "prove", *words], tmp_path)
    assert result.returncode == (1 if place else 0), result.output[-5000:]
    assert text in result.output
    assert f"first difference: {place}" in result.output or not place
    assert "Traceback" not in result.output
    assert "not reproducible" not in result.output
    assert json.loads((tmp_path / "found.json").read_text())["proved"] is (not place)
    assert [path.name for path in tmp_path.iterdir()] == ["found.json"]


def test_draws_in_training_excuse_no_evaluation(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests'}:{ROOT}")
    task = f"{ROOT}/tests/support/prove_tasks.py:Batchwise"
    words = ("--framework", "torch", "--task", task, "--steps", "2", "--json", "found.json")
    result = run(["python", "-m", "hvdtrain", "prove", *words], tmp_path)
    assert result.returncode == 1, result.output[-5000:]
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    assert [row["ok"] for row in rows] == [True, True, None, None, False, True], result.output
    assert "spread: averaged over batches" in rows[4]["cause"]


def test_a_limit_ends_the_job_and_leaves_no_folder(tmp_path):
    words = ("prove", "--framework", "torch", "--limit", "1", "--task", f"{ROOT}/{CASES['queue'][0]}")
    path = f"{ROOT / 'tests'}:{ROOT}"
    command = [*launcher(2, "gloo"), "python", "-m", "hvdtrain", *words]
    result = run(command, tmp_path, TMPDIR=str(tmp_path), PYTHONPATH=path)
    assert result.returncode != 0
    assert "did not end within 1 s and is ended; give a larger --limit" in result.output
    assert not [*tmp_path.glob("hvdtrain-prove-*")]


PARITY = ["python", "-m", "hvdtrain", "parity", "--steps", "10", "--json", "found.json", "--task"]
WORDS = f"{ROOT}/tests/support/parity_tasks.py:Words"


def test_the_layer_and_the_cause_are_named(tmp_path):
    result = run([*PARITY, WORDS, "--set", "task_options.mistake=epsilon"], tmp_path)
    assert result.returncode == 4, result.output[-5000:]
    assert "first difference: norm: " in result.stdout
    assert "cause: norm: epsilon: 1e-05 in PyTorch, 1e-06 in TensorFlow" in result.stdout
    assert "Traceback" not in result.output
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["findings"][0]["layer"] == "norm"
    assert not document["parity"]


def test_under_a_launcher_it_says_what_to_type(tmp_path):
    result = run([*launcher(2, "mpi"), *PARITY, WORDS], tmp_path)
    assert result.returncode == 2
    assert "python -m hvdtrain parity" in result.stderr
