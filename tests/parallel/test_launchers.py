"""Every way to start a job, with a task file of one's own."""

import json
from pathlib import Path

import pytest
import small_task
from support import pool
from support.jobs import FRAMEWORKS, Run, launcher, run, train

TASKS = Path(small_task.__file__)


# horovodrun starts the script below over MPI, and the worker that takes long over Gloo
@pytest.mark.parametrize(("launched_by", "controller"), [("mpirun", "MPI"), ("torchrun", "Gloo")])
def test_a_task_file_trains(launched_by, controller, tmp_path):
    job = train(2, launched_by, "--framework", "torch", "--task", f"{TASKS}:Small", cwd=tmp_path)
    assert f"coordinated by {controller}" in job.result.stdout
    assert job.summary["workers"] == 2
    assert job.summary["samples"] == 200
    assert job.summary["final"]["loss"] < job.losses[0] / 2
    assert job.summary["final"].keys() == {"loss", "mae"}


def test_a_launch_that_mpi_does_not_see_is_refused(tmp_path):
    # as srun --mpi=pmi2 or another MPI's mpiexec starts a process: MPI sees it alone
    command = ["python", "-m", "hvdtrain", "--framework", "torch", "--run-dir", "run"]
    result = run(command, tmp_path, PMI_SIZE="2", PMI_RANK="0")
    assert result.returncode == 3, result.output
    assert "started 2 processes (by PMI_SIZE), but Horovod sees one worker" in result.output
    assert "horovodrun -np 2 python -m hvdtrain" in result.output
    assert not (tmp_path / "run").exists()


SCRIPT = """
import json
from pathlib import Path

import hvdtrain


class Mine:
    loss = "mse"

    def train_data(self):
        import numpy as np

        inputs = np.random.RandomState(0).randn(40, 3).astype("float32")
        return inputs, inputs[:, :1] * 2

    def eval_data(self):
        return None

    def torch_model(self):
        from torch import nn

        return nn.Linear(3, 1)


if __name__ == "__main__":
    for folder in ("first", "out"):
        summary = hvdtrain.train(Mine, framework="torch", epochs=3, batch_size=5, log_every=1, run_dir=folder)
    print(json.dumps(summary.as_dict()))
"""


def test_a_script_trains_its_own_class_twice_and_every_worker_gets_the_summary(tmp_path):
    (tmp_path / "mine.py").write_text(SCRIPT)
    result = run([*launcher(2, "mpi"), "python", "mine.py"], tmp_path)
    assert result.returncode == 0, result.output[-5000:]
    assert "coordinated by MPI" in result.stdout
    first, second = (Run(tmp_path / name, result) for name in ("first", "out"))
    assert (second.summary["workers"], second.summary["samples"]) == (2, 120)
    assert second.summary["task"].endswith("mine.py:Mine")
    assert first.losses == second.losses
    assert len(first.losses) == 12
    one, other = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    same = ("status", "workers", "steps", "samples", "final", "run_dir")
    assert [one[name] for name in same] == [other[name] for name in same]
    assert one["status"] == "completed"


def test_a_worker_that_takes_long_over_its_data_holds_up_no_start(tmp_path):
    options = ("--framework", "torch", "--task", f"{TASKS}:SlowToOpen")
    job = train(2, "gloo", *options, cwd=tmp_path, HOROVOD_GLOO_TIMEOUT_SECONDS=str(small_task.GLOO_SECONDS))
    assert "coordinated by Gloo" in job.result.stdout
    assert job.summary["status"] == "completed"


def test_a_task_may_use_its_framework_before_the_model_is_built(tmp_path):
    job = train(1, "none", "--framework", "tf", "--task", f"{TASKS}:UsesItsFramework", cwd=tmp_path)
    assert job.summary["status"] == "completed"


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_branch_without_gradient_on_one_worker_trains_and_says_so_once(framework, tmp_path):
    options = ("--framework", framework, "--task", f"{TASKS}:Branching", "--weight-decay", "0.01")
    job = pool.train(2, pool.controller_of(framework, 2), *options, cwd=tmp_path)
    assert job.summary["status"] == "completed"  # equal parameters at the end included
    assert job.result.output.count("no gradient reached") == 1
    assert "model/branch/kernel on rank 1, model/branch/bias on rank 1 at step 1" in job.result.output
