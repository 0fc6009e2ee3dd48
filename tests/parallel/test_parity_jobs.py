"""``parity`` as a job: PyTorch and TensorFlow in one launch over MPI, with one and two workers of each."""

import json

from support.documents import ROOT
from support.jobs import launcher, run

TASKS = ROOT / "tests" / "support" / "parity_tasks.py"
COMMAND = ["python", "-m", "hvdtrain", "parity", "--steps", "10", "--json", "found.json", "--task"]


def test_a_job_of_both_frameworks_names_the_layer_and_the_cause(tmp_path):
    options = ["--set", "task_options.mistake=epsilon"]
    result = run([*launcher(2, "mpi"), *COMMAND, f"{TASKS}:Words", *options], tmp_path)
    assert result.returncode == 4, result.output[-5000:]
    assert "first difference: norm: " in result.stdout
    assert "cause: norm: epsilon: 1e-05 in PyTorch, 1e-06 in TensorFlow" in result.stdout
    assert "Traceback" not in result.output
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["findings"][0]["layer"] == "norm"
    assert not document["parity"]


def test_two_workers_of_each_framework_have_parity(tmp_path):
    result = run([*launcher(4, "mpirun"), *COMMAND, f"{TASKS}:Pictures"], tmp_path)
    assert result.returncode == 0, result.output[-5000:]
    assert "parity: the models compute the same" in result.stdout
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["parity"]
    assert document["workers_of_each"] == 2


def test_without_mpi_it_says_what_to_type(tmp_path):
    result = run([*launcher(2, "gloo"), *COMMAND, f"{TASKS}:Words"], tmp_path)
    assert result.returncode == 2
    assert "horovodrun --mpi -np 2 python -m hvdtrain parity" in result.stderr
