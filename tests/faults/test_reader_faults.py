"""Reader processes in jobs that end badly: they say why, once, and none is left."""

import os
import re
import signal

import psutil
import pytest
from endings import HOST, disturbed, slow
from support.jobs import is_running, started


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


@pytest.mark.parametrize(("controller", "whom"), [("mpi", "reader"), ("gloo", "worker")])
def test_a_killed_reader_ends_the_job_with_a_message_and_readers_end_with_their_worker(
    controller, whom, tmp_path
):
    before, readers = shared_memory(), {}

    def kill(job: started) -> None:
        readers.update(readers_of(job))
        worker = int((tmp_path / "pid-1").read_text())
        os.kill(readers[worker][0] if whom == "reader" else worker, signal.SIGKILL)

    ending = disturbed(slow("torch", controller, "--read-workers", "2"), tmp_path, kill)
    assert [len(pids) for pids in readers.values()] == [2, 2]
    assert [pid for pids in readers.values() for pid in pids if is_running(pid)] == []
    if whom == "worker":
        assert ending.returncode != 0
        return
    assert ending.returncode == 3
    assert re.match(rf"rank 1 on {HOST}: reader process \d+ was killed \(SIGKILL\)", ending.message)
    assert "Traceback" not in ending.output
    assert shared_memory() == before
