"""Reader processes in jobs that end badly: they say why, once, and none is left."""

import os
import re
import signal
import socket

import psutil
import pytest
from endings import SOON_SECONDS, TASKS, command_for, end_of, ended, steps_logged, wait_until
from support.jobs import is_running, started

READERS = ("--read-workers", "2")


def readers_of(job: started) -> dict[int, list[int]]:
    """Give the reader processes of a job by their worker."""
    found: dict[int, list[int]] = {}
    for pid in job.pids():
        try:
            process = psutil.Process(pid)
            if any("hvdtrain.data.readers" in word for word in process.cmdline()):
                found.setdefault(process.ppid(), []).append(pid)
        except psutil.NoSuchProcess:
            pass
    return found


def shared_memory() -> set[str]:
    """Give what Python's and numpy's sharing between processes would leave behind."""
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "hvdtrain"))}


def kill(framework: str, controller: str, whom: str, cwd) -> tuple:
    """Kill a reader or its worker in the middle of a job; give how the job ended, and its readers."""
    command = command_for(2, controller, "Slow", "--framework", framework, *READERS)
    with started(command, cwd) as job:
        wait_until(lambda: steps_logged(cwd) >= 3)
        readers = readers_of(job)
        worker = int((cwd / "pid-1").read_text())
        os.kill(readers[worker][0] if whom == "reader" else worker, signal.SIGKILL)
        return ended(job, cwd), readers


@pytest.mark.parametrize(("framework", "controller"), [("torch", "mpi")])
def test_a_killed_reader_ends_the_job_with_a_message(framework, controller, tmp_path):
    before = shared_memory()
    ending, readers = kill(framework, controller, "reader", tmp_path)
    assert [len(pids) for pids in readers.values()] == [2, 2]
    assert ending.returncode == 3
    (line,) = re.findall(r"^hvdtrain: .*", ending.output, re.MULTILINE)
    assert re.match(
        rf"hvdtrain: rank 1 on {socket.gethostname()}: reader process \d+ was killed \(SIGKILL\)", line
    )
    assert "Traceback" not in ending.output
    assert shared_memory() == before


def test_readers_of_a_killed_worker_end_with_it(tmp_path):
    ending, readers = kill("torch", "gloo", "worker", tmp_path)
    assert ending.returncode != 0
    assert [len(pids) for pids in readers.values()] == [2, 2]
    assert [pid for pids in readers.values() for pid in pids if is_running(pid)] == []


@pytest.mark.parametrize(("framework", "controller"), [("torch", "gloo")])
def test_what_a_data_set_raises_in_a_reader_ends_the_job_as_in_a_thread(framework, controller, tmp_path):
    options = ("--framework", framework, "--read-workers", "1")
    ending = end_of(2, controller, "DataRaises", *options, cwd=tmp_path)
    assert ending.returncode == 4
    (line,) = re.findall(r"^hvdtrain: .*", ending.output, re.MULTILINE)
    assert line.startswith(f"hvdtrain: rank 1 on {socket.gethostname()}: training failed at step ")
    assert re.search(r"ValueError: the flux capacitor is empty \(sample \d+\)$", line)
    assert ending.output.count("Traceback (most recent call last)") == 1
    assert f'File "{TASKS}", line ' in ending.output
    assert ending.summary["status"] == "failed"
    assert ending.seconds_since_failure() < SOON_SECONDS
