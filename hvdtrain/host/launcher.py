"""Where a person watches: the terminal, also through a launcher that stands in between."""

import os
import re
import sys
from collections.abc import Mapping
from typing import IO

import psutil
from rich.console import Console

# variables by which launchers tell a process that it is one of several
_LAUNCHER_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_LAUNCHERS = {"horovodrun", "mpirun", "mpiexec", "prterun", "orterun"}


def launched_rank() -> int | None:
    """Give the rank that a launcher gave this process, or None where there is no launcher."""
    for variable in _LAUNCHER_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return None


def workers_here(environ: Mapping[str, str]) -> int:
    """Give the number of workers that mpirun or Slurm's srun started on this host; 0 where neither did."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        return int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    # by node, such as "2(x3),1": three nodes with two tasks, and one with one
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
    node = int(environ.get("SLURM_NODEID", "0"))
    return tasks[node] if node < len(tasks) else 0


def open_console() -> Console:
    """Open the console that rank 0 shows the run on.

    Launchers take a worker's output apart into lines and tag them, which no progress bar
    survives; and Open MPI gives its workers pseudo-terminals that nobody sees. So under a
    launcher whose own output is a terminal of this machine, the console is that terminal.
    """
    if launched_rank() is None:
        return Console()
    terminal = _launcher_terminal()
    if terminal is not None:
        return Console(file=terminal, force_terminal=True)
    return Console(file=sys.stdout, force_terminal=False, width=160, soft_wrap=True)


def _launcher_terminal() -> IO[str] | None:
    try:
        launchers = [p for p in psutil.Process().parents() if p.name() in _LAUNCHERS]
        if launchers:
            path = os.readlink(f"/proc/{launchers[-1].pid}/fd/1")
            if path.startswith(("/dev/pts/", "/dev/tty")):
                return open(path, "w", encoding="utf-8")  # open as long as the process lives
    except (psutil.Error, OSError):
        pass
    return None
