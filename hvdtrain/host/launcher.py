"""What the launcher tells a worker: its rank, the number of workers on its host, the terminal to write to."""

import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import IO, Any

import psutil
from rich.console import Console
from rich.text import Text

from hvdtrain.host.output import tolerant
from hvdtrain.printable import printable

ELASTIC_VARIABLE = "HVDTRAIN_ELASTIC"  # the addresses of an elastic job's driver, in its workers
WORKER_VARIABLE = "HVDTRAIN_WORKER"  # the name that it gave this worker, such as "w7"
SLOT_VARIABLE = "HVDTRAIN_SLOT"  # its number among the slots of its host

# the variables in which launchers pass the rank
_LAUNCHER_VARIABLES = ("HOROVOD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK")
_LAUNCHERS = {"horovodrun", "mpirun", "mpiexec", "prterun", "orterun", "pt_elastic"}  # the last is torchrun


def is_elastic(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this process is a worker of an elastic job, whatever else started it."""
    return bool(environ.get(ELASTIC_VARIABLE))


def host_name(environ: Mapping[str, str] = os.environ) -> str:
    """Return the name of this host in messages: in an elastic job, the one by which its launcher knows it."""
    variables = ("HOROVOD_HOSTNAME", "SLURMD_NODENAME") if is_elastic(environ) else ()
    return next((environ[name] for name in variables if environ.get(name)), "") or socket.gethostname()


def launched_rank() -> int | None:
    """Return the rank that a launcher gave this process, or None without a launcher.

    In an elastic job it is the rank in the current world, and None until there is one: ranks of Slurm or
    MPI, which only started the processes, do not count.
    """
    for variable in _LAUNCHER_VARIABLES[:1] if is_elastic() else _LAUNCHER_VARIABLES:
        value = os.environ.get(variable, "")
        if value.isdecimal():
            return int(value)
    return None


def workers_on_this_host(environ: Mapping[str, str]) -> int:
    """Return the number of workers that mpirun or Slurm's srun started on this host; 0 if neither did."""
    if "OMPI_COMM_WORLD_LOCAL_SIZE" in environ:
        return int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"])
    # tasks by node: "2(x3),1" means three nodes with two tasks each, then one node with one task
    groups = re.findall(r"(\d+)(?:\(x(\d+)\))?", environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    tasks = [int(count) for count, nodes in groups for _ in range(int(nodes or 1))]
    node = int(environ.get("SLURM_NODEID", "0"))
    return tasks[node] if node < len(tasks) else 0


_muted: list[bool] = []  # one entry for each ``muted_console`` that mutes


@contextmanager
def muted_console(muted: bool = True) -> Iterator[None]:
    """Return a context in which jobs show nothing: ``open_console`` returns a console that writes nowhere.

    Args:
        muted: whether it does; otherwise the context changes nothing.
    """
    before = len(_muted)
    _muted.extend([True] * muted)
    try:
        yield
    finally:
        del _muted[before:]


def is_muted() -> bool:
    """Return whether jobs of this process show nothing."""
    return bool(_muted)


def open_console() -> Console:
    """Open the console on which rank 0 shows the run; what cannot be written to it does not end the job.

    Launchers split the output of workers into lines and tag them, which breaks a progress bar, and Open MPI
    gives workers pseudo-terminals that are not displayed. If the launcher's own output is a terminal of this
    machine, the console writes to this terminal. Otherwise it writes plain lines to standard output,
    which are not wrapped. In ``muted_console`` it writes nowhere.
    """
    if _muted:
        return _Console(quiet=True, force_terminal=False, force_jupyter=False)
    if launched_rank() is None:
        console = _Console(file=tolerant(sys.stdout))
        return console if console.is_terminal or console.is_jupyter else _plain_console()
    terminal = _launcher_terminal()
    if terminal is not None:
        return _Console(file=tolerant(terminal, "the terminal"), force_terminal=True)
    return _plain_console()


def _plain_console() -> Console:
    return _Console(file=tolerant(sys.stdout), force_terminal=False, width=160, soft_wrap=True)


class _Console(Console):
    """A console for words that may come from a file of somebody else: it shows no control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text to be printed, without what could control the terminal."""
        return super().render_str(printable(text), **options)


def _launcher_terminal() -> IO[str] | None:
    try:
        launchers = [p for p in psutil.Process().parents() if p.name() in _LAUNCHERS]
        if launchers:
            path = os.readlink(f"/proc/{launchers[-1].pid}/fd/1")
            if path.startswith(("/dev/pts/", "/dev/tty")):
                return open(path, "w", encoding="utf-8")  # stays open until the process ends
    except (psutil.Error, OSError):
        pass
    return None
