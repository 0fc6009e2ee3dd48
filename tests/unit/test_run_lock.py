"""The lock of a run directory: one job at a time, and a message that names the other."""

import errno
import fcntl
import json
import math
import os
import signal
import socket
import struct
import subprocess
import sys

import pytest

from hvdtrain.errors import EnvironmentFault
from hvdtrain.jobs.run_lock import RunLock
from hvdtrain.reporting.lock_state import LOCK_FILE

# a second process: a lock does not keep out the process that holds it
OTHER = """
import sys
from pathlib import Path
from hvdtrain.errors import EnvironmentFault
from hvdtrain.jobs.run_lock import RunLock
lock = RunLock()
try:
    lock.acquire(Path(sys.argv[1]))
except EnvironmentFault as error:
    print(error.problem)
else:
    print("locked")
"""


def other_process(run_dir) -> str:
    command = [sys.executable, "-c", OTHER, str(run_dir)]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout.strip()


def test_a_second_job_is_told_who_holds_the_lock(tmp_path):
    with RunLock() as lock:
        lock.acquire(tmp_path)
        said = other_process(tmp_path)
    assert said.startswith(f"run_dir: {tmp_path} is in use by another job: process {os.getpid()} on ")
    assert " since 20" in said


def test_a_lock_is_free_when_it_is_released_or_its_process_has_ended(tmp_path):
    with RunLock() as lock:
        lock.acquire(tmp_path)
    assert other_process(tmp_path) == "locked"
    assert other_process(tmp_path) == "locked"


def test_the_same_job_can_acquire_it_twice(tmp_path):
    with RunLock() as lock:
        lock.acquire(tmp_path)
        lock.acquire(tmp_path)
        assert "in use" in other_process(tmp_path)


def test_a_file_with_other_content_is_no_hindrance(tmp_path):
    (tmp_path / LOCK_FILE).write_bytes(b"\xff" * 10_000)
    with RunLock() as lock:
        lock.acquire(tmp_path)
        assert "process" in other_process(tmp_path)


def test_a_link_is_not_followed(tmp_path):
    target = tmp_path / "precious"
    target.write_text("content")
    (tmp_path / LOCK_FILE).symlink_to(target)
    with pytest.raises(OSError, match="it is a link, which is not followed"):
        RunLock().acquire(tmp_path)
    assert target.read_text() == "content"


def test_a_file_system_without_locks_is_noted(tmp_path, monkeypatch):
    def refuse(*operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with RunLock() as lock:
        lock.acquire(tmp_path)
        assert lock.note == f"{tmp_path} is not locked against other jobs: {os.strerror(errno.ENOLCK)}"


def test_a_lock_that_is_held_is_no_lock_problem(tmp_path, monkeypatch):
    def refuse(*operation):
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with pytest.raises(EnvironmentFault, match="is in use by another job"):
        RunLock().acquire(tmp_path)


def test_a_pipe_is_refused(tmp_path):
    os.mkfifo(tmp_path / LOCK_FILE)
    with pytest.raises(OSError, match="it is not a regular file"):
        RunLock().acquire(tmp_path)


@pytest.mark.parametrize("mask", [0o022, 0o002])
def test_the_file_is_as_writable_as_the_umask_lets_it_be(tmp_path, mask):
    """Others of a group resume the run, too."""
    before = os.umask(mask)
    try:
        with RunLock() as lock:
            lock.acquire(tmp_path)
    finally:
        os.umask(before)
    assert (tmp_path / LOCK_FILE).stat().st_mode & 0o777 == 0o666 & ~mask


@pytest.mark.parametrize(
    ("content", "holder", "more"),
    [
        ({"pid": 7, "host": "gone", "since": "2026"}, ": process 7 on gone since 2026", "If gone is lost"),
        ({"pid": 7, "host": socket.gethostname(), "since": "2026"}, ": process 7 on ", ""),
        ({"pid": 7}, "", ""),
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
        "from hvdtrain.jobs.run_lock import RunLock\n"
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
            assert "in use" in other_process(tmp_path)
            holder.kill()
            holder.wait(60)
            assert other_process(tmp_path) == "locked"
        finally:
            holder.kill()
            os.kill(child, signal.SIGKILL)


def test_a_kernel_without_locks_of_open_files_is_noted(tmp_path, monkeypatch):
    def refuse(*operation):
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(fcntl, "fcntl", refuse)
    with RunLock() as lock:
        lock.acquire(tmp_path)
        assert lock.note.startswith("this system has no locks of open files (F_OFD_SETLK): other jobs can")
        assert "in use" in other_process(tmp_path)


@pytest.mark.parametrize("is_removed", [False, True])
def test_a_job_sees_that_another_one_has_its_lock(tmp_path, is_removed):
    """Where the file was removed, as the message of a refused job says, or a server gave the lock away."""
    with RunLock() as first, RunLock() as second:
        first.acquire(tmp_path)
        assert first.lost() == ""
        first._looked_seconds = -math.inf
        if is_removed:
            (tmp_path / LOCK_FILE).unlink()
        else:
            fcntl.fcntl(first._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_UNLCK, 0, 0, 0, 0))
        second.acquire(tmp_path)
        assert first.lost().startswith(f"the run directory was taken over: process {os.getpid()} on ")
        assert second.lost() == ""
