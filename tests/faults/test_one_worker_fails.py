"""Something is wrong on one worker alone: one message says what and where, and every worker ends soon."""

import re

import pytest
from endings import HOST, SOON_SECONDS, SOON_WITH_IMPORT_SECONDS, TASKS, end_of, run_to_end
from support.jobs import launcher
from support.pool import command

# what a task raises; of data, with the sample that was being read
RAISED = re.compile(r"ValueError: the flux capacitor is empty( \(sample \d+\))?$")


@pytest.mark.parametrize(
    "job",
    [
        ("torch", "mpi", "DataRaises"),
        ("torch", "gloo", "DataRaises"),
        ("tf", "gloo", "LossRaises"),
        ("script",),
    ],
    ids="-".join,
)
def test_an_error_in_training_appears_once_and_whole(job, tmp_path):
    """Over Gloo, a reader process reads the data."""
    if job == ("script",):  # which calls hvdtrain.train() and catches nothing
        ending = run_to_end([*launcher(2, "mpi"), "python", str(TASKS)], tmp_path)
    else:
        framework, controller, task = job
        readers = ("--read-workers", str(int(job[:2] == ("torch", "gloo"))))
        ending = end_of(2, controller, task, "--framework", framework, *readers, cwd=tmp_path)
    assert ending.returncode == 4
    assert ending.seconds_since_failure() < SOON_SECONDS
    assert ending.message.startswith(f"rank 1 on {HOST}: training failed at step ")
    assert RAISED.search(ending.message)
    assert ending.output.count("Traceback (most recent call last)") == 1
    assert 'raise ValueError("the flux capacitor is empty")' in ending.output
    assert f'File "{TASKS}", line ' in ending.output
    assert ending.summary["status"] == "failed"
    assert ending.summary["error"].startswith(f"rank 1 on {HOST}: training failed at step ")
    assert RAISED.search(ending.summary["error"])


def test_a_first_batch_that_fails_where_others_wait_in_synchronised_batch_norm(tmp_path):
    ending = end_of(2, "gloo", "DryRunRaises", "--framework", "torch", "--sync-batch-norm", cwd=tmp_path)
    assert ending.returncode == 2
    assert ending.seconds_since_failure() < SOON_SECONDS
    assert ending.output.count("hvdtrain: ") == 1
    assert ending.message.startswith(f"rank 1 on {HOST}: the first batch of the training data fails")
    assert re.search(rf"{TASKS}, line \d+: ValueError: .*the flux capacitor is empty", ending.message)
    assert ending.output.count("It has inputs float32 (4, 4), targets float32 (4, 3)") == 1
    assert "Traceback" not in ending.output
    assert not (tmp_path / "run").exists()


def test_a_model_that_one_worker_cannot_build(tmp_path):
    ending = end_of(2, "gloo", "BrokenModel", "--framework", "torch", cwd=tmp_path)
    assert ending.returncode == 2
    assert ending.output.count("hvdtrain: ") == 1
    assert ending.message.startswith(f"rank 1 on {HOST}: ")
    assert ending.output.count("ValueError: no weights to start from") == 1
    assert "Traceback" not in ending.output
    assert ending.seconds_since_failure() < SOON_WITH_IMPORT_SECONDS


def test_a_pickle_is_not_executed_and_ends_the_job_with_a_message(tmp_path):
    ending = end_of(2, "gloo", "SendsPickles", "--framework", "torch", cwd=tmp_path)
    assert ending.returncode == 3
    assert "what arrived from rank 1 is not what the workers exchange here" in ending.output
    assert "another program joined the job" in ending.output
    assert "Traceback" not in ending.output
    assert not (tmp_path / "executed").exists()
    assert not (tmp_path / "run").exists()


def test_options_that_differ_are_named_with_both_values(tmp_path):
    """Two commands under one mpirun, which differ in two options."""
    parts = []
    for given in (["--seed", "1", "--momentum", "0.5"], ["--seed", "2", "--momentum", "0.25"]):
        training = ["python", "-m", "hvdtrain", "--framework", "torch", "--task", f"{TASKS}:Sound"]
        parts.append(["-np", "1", *training, "--run-dir", "run", *given])
    words = ["mpirun", "--bind-to", "none", "--oversubscribe", *parts[0], ":", *parts[1]]
    ending = run_to_end(words, tmp_path)
    assert ending.returncode == 3
    assert ending.output.count("the workers disagree before training") == 1
    assert "Traceback" not in ending.output
    assert not (tmp_path / "run").exists()
    assert ending.seconds < SOON_WITH_IMPORT_SECONDS, "no worker waits for a limit"
    assert f"seed: 1 on rank 0 ({HOST}), 2 on rank 1 ({HOST})" in ending.output
    assert f"momentum: 0.5 on rank 0 ({HOST}), 0.25 on rank 1 ({HOST})" in ending.output


DIFFER = {
    "OtherShape": ("the workers disagree", "kernel: (4, 5) on rank 0 ({0}), (4, 8) on rank 1 ({0})"),
    "OtherOrder": ("torch_model() must make", "0.a.bias: (3, 'torch.float32', (3,)) on rank 0 ({0}), (5, "),
}


@pytest.mark.parametrize("task", DIFFER)
def test_a_parameter_whose_shape_or_place_differs_is_named_with_both_values(task, tmp_path):
    words = ("--framework", "torch", "--task", f"{TASKS}:{task}", "--run-dir", "run")
    result = command(2, "mpi", "torch", *words, cwd=tmp_path)
    assert result.returncode == 3, result.output
    assert [result.output.count(said.format(HOST)) for said in DIFFER[task]] == [1, 1], result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "run").exists()
