"""Running other programs so that none outlives the build."""

import contextlib
import os
import subprocess
import sysconfig
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import psutil

from hvdtrain.host.processes import run_limited, start_group

KILL_SECONDS = 10  # that killed processes have to disappear


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


def output_of(*command: str) -> str | None:
    """Return the output of a command, both streams, or None if it is missing, fails or takes a minute."""
    try:
        done = run_limited(command, 60)
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

    At the limit, which is a TimeoutError, or if this process is interrupted, the command has some seconds to
    end before it and all its descendants are killed.
    """
    timed_out: list[bool] = []
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    with start_group(command, env=env, cwd=folder, **pipe) as process:

        def stop() -> None:
            timed_out.append(True)
            _end_tree(process.pid, grace_seconds)

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
            _end_tree(process.pid, grace_seconds)
            raise
        finally:
            timer.cancel()
            timer.join()
    if timed_out:
        raise TimeoutError(f"not done after {limit_seconds:.0f} seconds")
    return exit_code


def _end_tree(pid: int, grace_seconds: float) -> None:
    """End a process and its descendants: SIGTERM to the process, then SIGKILL to all that are left."""
    with contextlib.suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
        root.terminate()
        _, left = psutil.wait_procs(tree, grace_seconds)
        with contextlib.suppress(psutil.NoSuchProcess):
            left += root.children(recursive=True)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, KILL_SECONDS)
