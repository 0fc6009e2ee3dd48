"""The lock of a run directory: one job at a time, and a message that names the other."""

import errno
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.jobs.run_directory.lock import RunLock
from hvdtrain.reporting.lock_state import LOCK_FILE

# a second process: a lock does not keep out the process that holds it
OTHER = """
import sys
from pathlib import Path
from hvdtrain.errors import EnvironmentFault
from hvdtrain.jobs.run_directory.lock import RunLock
try:
    RunLock().acquire(Path(sys.argv[1]))
    print("locked")
except EnvironmentFault as error:
    print(error.problem)
"""


def other_process(run_dir) -> str:
    command = [sys.executable, "-c", OTHER, str(run_dir)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.strip()


@pytest.mark.parametrize(
    ("content", "holder", "more"),
    [
        ({"pid": 7, "host": "gone", "since": "2026"}, ": process 7 on gone since 2026", "If gone is lost"),
        ({"pid": 7, "host": socket.gethostname(), "since": "2026"}, ": process 7 on ", ""),
    ],
)
def test_the_lock_of_another_host_that_is_lost_has_a_remedy(tmp_path, monkeypatch, content, holder, more):
    def refuse(*operation):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    (tmp_path / LOCK_FILE).write_text(json.dumps(content))
    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(EnvironmentFault, match="is in use by another job") as caught:
        RunLock().acquire(tmp_path)
    assert f"in use by another job{holder}" in caught.value.problem
    assert caught.value.remedy.partition("\n")[2].startswith(more)
    assert bool(more) == (f"remove {tmp_path / LOCK_FILE}" in caught.value.remedy)


def test_it_stays_if_the_file_is_read_and_goes_with_the_process_that_took_it(tmp_path):
    """A process that is forked and lives longer does not keep it."""
    code = (
        "import os, pathlib, sys, time\n"
        "from hvdtrain.jobs.run_directory.lock import RunLock\n"
        "lock, folder = RunLock(), pathlib.Path(sys.argv[1])\n"
        "lock.acquire(folder)\n"
        "(folder / '.lock').read_bytes()\n"
        "child = os.fork() or time.sleep(600)\n"
        "print(child, flush=True)\n"
        "time.sleep(600)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:
        child = int(holder.stdout.readline())
        try:
            said = other_process(tmp_path)
            assert f"{tmp_path} is in use by another job: process {holder.pid} on " in said
            assert " since 20" in said
            holder.kill()
            holder.wait(60)
            assert other_process(tmp_path) == "locked"
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)
