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


def test_the_error_appears_once_and_whole_and_every_worker_ends_soon(ending):
    assert ending.returncode == 4
    assert ending.seconds_since_failure() < SOON_SECONDS
    failed = f"rank 1 on {socket.gethostname()}: training failed at step "
    (line,) = re.findall(r"^hvdtrain: .*", ending.output, re.MULTILINE)
    assert line.startswith(f"hvdtrain: {failed}")
    assert RAISED.search(line)
    assert ending.output.count("Traceback (most recent call last)") == 1
    assert 'raise ValueError("the flux capacitor is empty")' in ending.output
    assert f'File "{TASKS}", line ' in ending.output
    assert ending.summary["status"] == "failed"
    assert ending.summary["error"].startswith(failed)
    assert RAISED.search(ending.summary["error"])
