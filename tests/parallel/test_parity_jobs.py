"""``parity`` as a command: each framework in a process of its own, and no launcher."""

import json

from support.documents import ROOT
from support.jobs import launcher, run

TASKS = ROOT / "tests" / "support" / "parity_tasks.py"
COMMAND = ["python", "-m", "hvdtrain", "parity", "--steps", "10", "--json", "found.json", "--task"]


def test_the_layer_and_the_cause_are_named(tmp_path):
    result = run([*COMMAND, f"{TASKS}:Words", "--set", "task_options.mistake=epsilon"], tmp_path)
    assert result.returncode == 4, result.output[-5000:]
    assert "first difference: norm: " in result.stdout
    assert "cause: norm: epsilon: 1e-05 in PyTorch, 1e-06 in TensorFlow" in result.stdout
    assert "Traceback" not in result.output
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["findings"][0]["layer"] == "norm"
    assert not document["parity"]


def test_under_a_launcher_it_says_what_to_type(tmp_path):
    result = run([*launcher(2, "mpi"), *COMMAND, f"{TASKS}:Words"], tmp_path)
    assert result.returncode == 2
    assert "python -m hvdtrain parity" in result.stderr
