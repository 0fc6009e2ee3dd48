"""Running other programs so that none of them outlives the build."""

import contextlib
import os
import subprocess
import sysconfig
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

# What killed processes get to be gone.
KILL_SECONDS = 10


def scripts_folder() -> Path:
    """Return the folder of the running environment's programs, which need not be on PATH."""
    return Path(sysconfig.get_path("scripts"))


def packages_folder() -> Path:
    """Return the folder where pip installs packages that have compiled parts."""
    return Path(sysconfig.get_path("platlib"))


def path_with(*first: Path) -> str:
    """Make a PATH with some folders in front: those given, then the environment's own programs."""
    folders = [str(folder) for folder in (*first, scripts_folder())]
    return os.pathsep.join([*folders, os.environ.get("PATH", os.defpath)])


def output_of(*command: str, seconds: float = 60) -> str | None:
    """Return the output of a short command, both streams; None where it is missing, fails or hangs."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=seconds,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode(errors="replace")


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
    """Run a command and everything that it starts, to its end or to a time limit.

    Args:
        command: program and arguments.
        log: gets every line of output.
        env: the whole environment.
        folder: where it runs.
        limit_seconds: after which the command and all its children are ended.
        grace_seconds: what the command gets to end by itself before all are killed, at the
            limit or when this process is interrupted.
        on_line: called with every line of output.

    Returns:
        The exit code.

    Raises:
        TimeoutError: the limit was reached.
        OSError: the command could not be started.
    """
    timed_out = threading.Event()
    with subprocess.Popen(
        command,
        env=env,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,  # a Ctrl-C reaches this process only, which ends the others
    ) as process:

        def stop() -> None:
            timed_out.set()
            end_tree(process.pid, grace_seconds)

        timer = threading.Timer(limit_seconds, stop)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                log.write(line)
                log.flush()
                on_line(line)
            exit_code = process.wait()
        except BaseException:
            end_tree(process.pid, grace_seconds)
            raise
        finally:
            timer.cancel()
            timer.join()
    if timed_out.is_set():
        raise TimeoutError(f"not done after {limit_seconds:.0f} seconds")
    return exit_code


def end_tree(pid: int, grace_seconds: float) -> None:
    """End a process and all its descendants: SIGTERM for the process, then SIGKILL for all."""
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
    """Wait for processes, at most some seconds, and return those that still run.

    psutil's own waiting would take the exit status away from the Popen object that it belongs
    to, and would wait for a zombie that nobody collects.
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
