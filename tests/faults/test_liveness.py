"""A worker that does not answer, makes no progress or left: the job ends in time and names it."""

import os
import re
import signal
import socket
import time
from pathlib import Path

import pytest
from endings import SOON_SECONDS, Ending, command_for, end_of, ended, steps_logged, wait_until
from support.jobs import started

TIMEOUT = 10  # a worker on a busy machine answers within it, some 10 times as often as it has to
HOST = socket.gethostname()
OPTIONS = ("--stall-timeout", str(TIMEOUT))


def frozen(framework: str, controller: str, rank: int, folder: Path) -> tuple[Ending, float]:
    """Train, stop a worker's process for ever, and return the ending and the seconds from there to it."""
    command = command_for(2, controller, "Slow", "--framework", framework, *OPTIONS)
    with started(command, folder) as job:
        wait_until(lambda: steps_logged(folder) >= 30)
        os.kill(int((folder / f"pid-{rank}").read_text()), signal.SIGSTOP)
        begun = time.time()
        ending = ended(job, folder)
    return ending, ending.ended - begun


@pytest.mark.parametrize(
    ("framework", "controller", "rank"),
    [("torch", "mpi", 0), ("tf", "gloo", 1)],
)
def test_a_frozen_worker_ends_the_job_in_time_and_is_named(framework, controller, rank, tmp_path):
    ending, seconds = frozen(framework, controller, rank, tmp_path)
    problem = (
        rf"rank {rank} on {HOST} has not answered for \d+ s: stopped or starved; last it was [a-z ]+[\d,]*"
    )
    (line,) = re.findall(r"^hvdtrain: .*", ending.output, re.MULTILINE)
    assert re.fullmatch(rf"hvdtrain: rank {1 - rank} on {HOST}: {problem}", line)
    assert ending.returncode == 3
    assert seconds < TIMEOUT + SOON_SECONDS
    assert re.fullmatch(problem, ending.summary["error"])
    assert ending.summary["status"] == "failed"


@pytest.mark.parametrize(
    ("framework", "controller", "task", "doing"),
    [
        ("torch", "gloo", "ModelWaits", r"in training step \d+ \(faulty_tasks.py, line \d+, in forward\)"),
        (
            "torch",
            "mpi",
            "DataWaits",
            r"reading data for training step \d+ \(faulty_tasks.py, line \d+, in __getitem__\)",
        ),
    ],
)
def test_code_of_the_user_that_waits_on_one_worker_ends_the_job_and_is_named(
    framework, controller, task, doing, tmp_path
):
    ending = end_of(2, controller, task, "--framework", framework, *OPTIONS, "--debug", cwd=tmp_path)
    (line,) = re.findall(r"^hvdtrain: .*", ending.output, re.MULTILINE)
    problem = rf"the others have waited for \d+ s: rank 1 on {HOST} is {doing}"
    assert re.fullmatch(rf"hvdtrain: rank 0 on {HOST}: {problem}", line)
    assert re.search(rf"rank 1 on {HOST}:\n +File ", ending.output), "the Python stack, for --debug"
    assert ending.returncode == 3
    assert ending.seconds_since_failure() < TIMEOUT + SOON_SECONDS
    assert re.fullmatch(problem, ending.summary["error"])


@pytest.mark.parametrize(("framework", "controller"), [("torch", "gloo"), ("torch", "mpi")])
def test_a_worker_that_leaves_with_the_code_of_success_is_a_failure_with_a_name(
    framework, controller, tmp_path
):
    ending = end_of(2, controller, "Leaves", "--framework", framework, cwd=tmp_path)
    problem = rf"rank 1 on {HOST} ended without a message in the middle of the job \(last it was .*\): .*"
    (line,) = re.findall(r"^hvdtrain: .*", ending.output, re.MULTILINE)
    assert re.fullmatch(rf"hvdtrain: rank 0 on {HOST}: {problem}", line)
    assert ending.returncode == 3
    assert ending.seconds_since_failure() < SOON_SECONDS
    assert re.fullmatch(problem, ending.summary["error"])


@pytest.mark.parametrize("controller", ["gloo"])
def test_an_only_worker_that_leaves_with_the_code_of_success_is_a_failure(controller, tmp_path):
    ending = end_of(1, controller, "LeavesAlone", "--framework", "torch", cwd=tmp_path)
    assert ending.returncode == 3
    assert "horovodrun: rank 0 (host localhost, slot 0) ended before the job was done" in ending.output
