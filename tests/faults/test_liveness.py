"""A worker that does not answer, makes no progress or left: the job ends in time and names it."""

import re
import signal

import pytest
from endings import HOST, SOON_SECONDS, end_of, signalled, slow

TIMEOUT = 10  # a worker on a busy machine answers within it, some 10 times as often as it has to
OPTIONS = ("--stall-timeout", str(TIMEOUT))


@pytest.mark.parametrize(("framework", "controller", "rank"), [("torch", "mpi", 0), ("tf", "gloo", 1)])
def test_a_frozen_worker_ends_the_job_in_time_and_is_named(framework, controller, rank, tmp_path):
    ending = signalled(slow(framework, controller, *OPTIONS), tmp_path, signal.SIGSTOP, rank, steps=30)
    problem = (
        rf"rank {rank} on {HOST} has not answered for \d+ s: stopped or starved; last it was [a-z ]+[\d,]*"
    )
    assert re.fullmatch(rf"rank {1 - rank} on {HOST}: {problem}", ending.message)
    assert ending.returncode == 3
    assert ending.seconds < TIMEOUT + SOON_SECONDS
    assert re.fullmatch(problem, ending.summary["error"])
    assert ending.summary["status"] == "failed"


@pytest.mark.parametrize(
    ("controller", "task", "doing"),
    [
        ("gloo", "ModelWaits", r"in training step \d+ \(faulty_tasks.py, line \d+, in forward\)"),
        (
            "mpi",
            "DataWaits",
            r"reading data for training step \d+ \(faulty_tasks.py, line \d+, in __get.*\)",
        ),
    ],
)
def test_code_of_the_user_that_waits_on_one_worker_ends_the_job_and_is_named(
    controller, task, doing, tmp_path
):
    ending = end_of(2, controller, task, "--framework", "torch", *OPTIONS, "--debug", cwd=tmp_path)
    problem = rf"the others have waited for \d+ s: rank 1 on {HOST} is {doing}"
    assert re.fullmatch(rf"rank 0 on {HOST}: {problem}", ending.message)
    assert re.search(rf"rank 1 on {HOST}:\n +File ", ending.output), "the Python stack, for --debug"
    assert ending.returncode == 3
    assert ending.seconds_since_failure() < TIMEOUT + SOON_SECONDS
    assert re.fullmatch(problem, ending.summary["error"])


@pytest.mark.parametrize("controller", ["gloo", "mpi"])
def test_a_worker_that_leaves_with_the_code_of_success_is_a_failure_with_a_name(controller, tmp_path):
    ending = end_of(2, controller, "Leaves", "--framework", "torch", cwd=tmp_path)
    problem = rf"rank 1 on {HOST} ended without a message in the middle of the job \(last it was .*\): .*"
    assert re.fullmatch(rf"rank 0 on {HOST}: {problem}", ending.message)
    assert ending.returncode == 3
    assert ending.seconds_since_failure() < SOON_SECONDS
    assert re.fullmatch(problem, ending.summary["error"])


def test_an_only_worker_that_leaves_with_the_code_of_success_is_a_failure(tmp_path):
    ending = end_of(1, "gloo", "LeavesAlone", "--framework", "torch", cwd=tmp_path)
    assert ending.returncode == 3
    assert "horovodrun: rank 0 (host localhost, slot 0) ended before the job was done" in ending.output
