"""Running other programs so that none outlives the build."""

import contextlib
import os
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from hvdtrain.host.processes import run_limited, start_group

# The time that killed processes have to disappear.
KILL_SECONDS = 10


def scripts_folder() -> Path:
    """Return the folder of the environment's programs, which need not be on PATH."""
    return Path(sysconfig.get_path("scripts"))


def packages_folder() -> Path:
    """Return the folder into which pip installs packages with compiled parts."""
    return Path(sysconfig.get_path("platlib"))


def path_with(*first: Path) -> str:
    """Return PATH with folders in front: those given, then the folder of the environment's programs."""
    folders = [str(folder) for folder in (*first, scripts_folder())]
    return os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])


def output_of(*command: str, seconds: float = 60) -> str | None:
    """Return the output of a command, both streams, or None if it is missing, fails or times out."""
    try:
        done = run_limited(command, seconds)
    except OSError:
        return None
    return done.output + done.errors if done.code == 0 else None


def run_logged(
    command: Sequence[str],
    log: IO[str],
    *,
    env: Mapping[str, str],
    folder: Path,
    limit_seconds: float,
    grace_seconds: float = 0,
    on_line: Callable[[str], None] = lambda line: None,
) -> int:
    """Run a command, each line of whose output is written to a log; return its exit code.

    At the limit, or if this process is interrupted, the command has some seconds to end before it and all its
    descendants are killed. Raises TimeoutError at the limit, and OSError if it could not be started.
    """
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    with (
        start_group(command, env=env, cwd=folder, **pipe) as process,
        _ended_at_limit(process.pid, limit_seconds, grace_seconds) as timed_out,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            log.write(line)
            log.flush()
            on_line(line)
        exit_code = process.wait()
    if timed_out.is_set():
        raise TimeoutError(f"not done after {limit_seconds:.0f} seconds")
    return exit_code


@contextlib.contextmanager
def _ended_at_limit(pid: int, limit_seconds: float, grace_seconds: float) -> Iterator[threading.Event]:
    """End a process and its descendants at a time limit, or if the block raises an exception."""
    timed_out = threading.Event()

    def stop() -> None:
        timed_out.set()
        end_tree(pid, grace_seconds)

    timer = threading.Timer(limit_seconds, stop)
    timer.start()
    try:
        yield timed_out
    except BaseException:
        end_tree(pid, grace_seconds)
        raise
    finally:
        timer.cancel()
        timer.join()


def end_tree(pid: int, grace_seconds: float) -> None:
    """End a process and its descendants: SIGTERM to the process, then SIGKILL to all that are left."""
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    with contextlib.suppress(psutil.NoSuchProcess):
        root.terminate()
    left = _wait_until_ended(tree, grace_seconds)
    with contextlib.suppress(psutil.NoSuchProcess):
        left += root.children(recursive=True)
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _wait_until_ended(left, KILL_SECONDS)


def _wait_until_ended(processes: list[psutil.Process], seconds: float) -> list[psutil.Process]:
    """Wait for processes for a limited time, and return those that still run.

    psutil's own functions would reap the exit status that the Popen object needs, and would wait for a zombie
    that nobody reaps.
    """
    deadline = time.monotonic() + seconds
    while processes := [process for process in processes if _runs(process)]:
        if time.monotonic() >= deadline:
            break
        time.sleep(0.05)
    return processes


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
