"""Runs the contract suites: PyTorch over MPI, TensorFlow over Gloo, and one worker."""

import json
import sys
from pathlib import Path

import pytest
from support import jobs
from support.jobs import FRAMEWORKS
from support.pool import run_suite

HERE = Path(__file__).parent
SUITES = ("backend", "transaction", "reduction", "local_steps", "low_rank", "batch_norm", "weights")
CELLS = [(suite, *cell) for suite in SUITES for cell in (("torch", 2, "mpi"), ("tf", 2, "gloo"))]


@pytest.mark.parametrize(
    ("suite", "framework", "workers", "controller"), [*CELLS, ("backend", "torch", 1, "none")]
)
def test_backends_keep_the_contract(suite, framework, workers, controller, tmp_path):
    # a job of its own also shows that a backend closes
    runner = jobs.run_suite if (suite, framework) == ("reduction", "torch") else run_suite
    runner(HERE / f"suite_{suite}.py", workers, controller, framework, cwd=tmp_path, timeout=550)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_in_which_horovod_ends_is_undone_and_the_next_is_done_alone(framework, tmp_path):
    job = HERE / "job_shut_down_in_step.py"
    done = jobs.run([*jobs.launcher(2, "gloo"), sys.executable, str(job), framework], tmp_path)
    assert done.returncode == 0, done.output
    found = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert "Horovod has been shut down" in found.pop("error")
    assert found == {"left": 0, "is_undone": True, "is_right": True}
