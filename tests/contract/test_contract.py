"""Runs the contract suites: PyTorch over MPI, TensorFlow over Gloo, and one worker."""

import json
import sys
from pathlib import Path

import pytest
from support import jobs
from support.jobs import FRAMEWORKS
from support.pool import run_suite

SUITE = Path(__file__).with_name("suite_backend.py")
TRANSACTION = Path(__file__).with_name("suite_transaction.py")
LOCAL_STEPS = Path(__file__).with_name("suite_local_steps.py")
REDUCTION = Path(__file__).with_name("suite_reduction.py")
LOW_RANK = Path(__file__).with_name("suite_low_rank.py")


@pytest.mark.parametrize(
    ("framework", "workers", "controller"),
    [
        ("torch", 1, "none"),
        ("torch", 2, "mpi"),
        ("tf", 2, "gloo"),
    ],
)
def test_backend_keeps_the_contract(framework, workers, controller, tmp_path):
    run_suite(SUITE, workers, controller, framework, cwd=tmp_path, timeout=500)


@pytest.mark.parametrize(("framework", "workers", "controller"), [("torch", 2, "mpi"), ("tf", 2, "gloo")])
def test_a_step_is_a_transaction(framework, workers, controller, tmp_path):
    run_suite(TRANSACTION, workers, controller, framework, cwd=tmp_path, timeout=550)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_step_in_which_horovod_ends_is_undone_and_the_next_is_done_alone(framework, tmp_path):
    job = Path(__file__).with_name(f"job_shut_down_in_step_{framework}.py")
    done = jobs.run([*jobs.launcher(2, "gloo"), sys.executable, str(job), "0"], tmp_path)
    assert done.returncode == 0, done.output
    found = json.loads(done.stdout[done.stdout.index("{") : done.stdout.rindex("}") + 1])
    assert "Horovod has been shut down" in found.pop("error")
    # what each framework may leave behind, or make anew
    assert {found.pop("handles", 0), found.pop("traces", 1) - 1} == {0}
    assert found == {"is_undone": True, "is_right": True}


# a job of its own also shows that a backend closes
@pytest.mark.parametrize(("framework", "workers", "controller"), [("torch", 2, "mpi"), ("tf", 2, "gloo")])
def test_reducers_keep_the_contract(framework, workers, controller, tmp_path):
    runner = jobs.run_suite if framework == "torch" else run_suite
    runner(REDUCTION, workers, controller, framework, cwd=tmp_path, timeout=500)


@pytest.mark.parametrize(("framework", "workers", "controller"), [("torch", 2, "mpi"), ("tf", 2, "gloo")])
def test_local_steps_keep_the_contract(framework, workers, controller, tmp_path):
    run_suite(LOCAL_STEPS, workers, controller, framework, cwd=tmp_path, timeout=500)


@pytest.mark.parametrize(("framework", "workers", "controller"), [("torch", 2, "mpi"), ("tf", 2, "gloo")])
def test_compressed_gradients_keep_the_contract(framework, workers, controller, tmp_path):
    run_suite(LOW_RANK, workers, controller, framework, cwd=tmp_path, timeout=500)
