"""Workers that a script launches end with it: after Ctrl-C, and if it is killed."""

import os
import signal
import time

import pytest
from support.jobs import started

WAITS = """
import time
import hvdtrain

def work():
    print("WORKING", flush=True)
    time.sleep(1000)

try:
    hvdtrain.launch(work, controller="{controller}")
except KeyboardInterrupt:
    print("INTERRUPTED")
"""
MOST_SECONDS = 180


def until(condition, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.parametrize(("controller", "number"), [("gloo", signal.SIGINT), ("mpi", signal.SIGKILL)])
def test_nothing_is_left(controller, number, tmp_path):
    (tmp_path / "job.py").write_text(WAITS.format(controller=controller))
    with started(["python", "job.py"], tmp_path) as job:
        until(lambda: job.result().stdout.count("WORKING") == 2, MOST_SECONDS)
        os.kill(job.process.pid, number)
        job.process.wait(MOST_SECONDS)
        until(lambda: not job.pids(), MOST_SECONDS)
        if number == signal.SIGINT:
            assert "INTERRUPTED" in job.result().stdout
            assert job.process.returncode == 0
