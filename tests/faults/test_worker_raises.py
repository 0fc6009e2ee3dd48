"""A worker's own code raises: it says so once and whole, and every worker ends soon."""

import re
import socket

import pytest
from endings import SOON_SECONDS, TASKS, Ending, end_of, run_to_end
from support.jobs import launcher

JOBS = [
    ("torch", "mpi", "DataRaises"),
    ("tf", "gloo", "LossRaises"),
]

# what a task raises; of data, with the sample that was being read
RAISED = re.compile(r"ValueError: the flux capacitor is empty( \(sample \d+\))?$")


@pytest.fixture(scope="module", params=[*JOBS, ("script",)], ids="-".join)
def ending(request, tmp_path_factory) -> Ending:
    folder = tmp_path_factory.mktemp("job")
    if request.param == ("script",):  # which calls hvdtrain.train() and catches nothing
        return run_to_end([*launcher(2, "mpi"), "python", str(TASKS)], folder)
    framework, controller, task = request.param
    return end_of(2, controller, task, "--framework", framework, cwd=folder)


def test_exit_code_says_that_training_failed(ending):
    assert ending.returncode == 4


def test_every_worker_ends_soon(ending):
    assert ending.seconds_since_failure() < SOON_SECONDS


def test_the_error_appears_once_with_rank_and_host(ending):
    (line,) = re.findall(r"^hvdtrain: .*", ending.output, re.MULTILINE)
    assert line.startswith(f"hvdtrain: rank 1 on {socket.gethostname()}: training failed at step ")
    assert RAISED.search(line)


def test_the_error_appears_whole(ending):
    assert ending.output.count("Traceback (most recent call last)") == 1
    assert 'raise ValueError("the flux capacitor is empty")' in ending.output
    assert f'File "{TASKS}", line ' in ending.output


def test_the_summary_says_that_the_run_failed_and_why(ending):
    assert ending.summary["status"] == "failed"
    assert re.match(rf"rank 1 on {socket.gethostname()}: training failed at step ", ending.summary["error"])
    assert RAISED.search(ending.summary["error"])
