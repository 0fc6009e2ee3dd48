"""What the launcher sets for a worker: rank, number of workers on its host, the terminal to write to."""

import json
import os
import re
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import IO, Any

import psutil
from rich.console import Console
from rich.text import Text

from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.host.output import tolerant
from hvdtrain.storage.text import printable

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
    return (is_elastic(environ) and environ.get("HOROVOD_HOSTNAME")) or socket.gethostname()


def launched_rank() -> int | None:
    """Return the rank that a launcher gave this process, or None without a launcher."""
    for variable in _LAUNCHER_VARIABLES[:1] if is_elastic() else _LAUNCHER_VARIABLES:
        if (value := os.environ.get(variable, "")).isdecimal():
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
    """Return a context in which jobs show nothing: ``open_console`` returns a console that writes nowhere."""
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
    """Open the console on which rank 0 shows the run; what cannot be written to it does not end the job."""
    if _muted:
        return _Console(quiet=True, force_terminal=False, force_jupyter=False)
    if launched_rank() is None:
        console = _Console(file=tolerant(sys.stdout))
        if console.is_terminal or console.is_jupyter:
            return console
    elif (terminal := _launcher_terminal()) is not None:
        return _Console(file=tolerant(terminal, "the terminal"), force_terminal=True)
    return _Console(file=tolerant(sys.stdout), force_terminal=False, width=160, soft_wrap=True)


class _Console(Console):
    """A console for words that may come from a file of somebody else: it shows no control characters."""

    def render_str(self, text: str, **options: Any) -> Text:
        """Return a text to be printed, without what could control the terminal."""
        return super().render_str(printable(text), **options)


def _launcher_terminal() -> IO[str] | None:
    with suppress(psutil.Error, OSError):
        if launchers := [p for p in psutil.Process().parents() if p.name() in _LAUNCHERS]:
            path = os.readlink(f"/proc/{launchers[-1].pid}/fd/1")
            if path.startswith(("/dev/pts/", "/dev/tty")):
                return open(path, "w", encoding="utf-8")  # stays open until the process ends
    return None


HOROVODRUN, TORCHRUN, SRUN, MPIRUN = "horovodrun", "torchrun", "srun", "mpirun"
_UNKNOWN = "a launcher"

# launcher, its variables for the number of processes and the rank. A launcher that runs inside another one
# stands before it: srun starts the daemons of mpirun, and mpirun may start torchrun once per host.
_VARIABLES = (
    (HOROVODRUN, "HOROVOD_SIZE", "HOROVOD_RANK"),
    (TORCHRUN, "WORLD_SIZE", "RANK"),
    (MPIRUN, "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun of MVAPICH", "MV2_COMM_WORLD_SIZE", "MV2_COMM_WORLD_RANK"),
    ("mpiexec of another MPI", "PMI_SIZE", "PMI_RANK"),
    (SRUN, "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    (_UNKNOWN, "WORLD_SIZE", "RANK"),
)


@dataclass(frozen=True)
class Launch:
    """What a launcher states in the environment of a process that it started."""

    launcher: str  # its name
    variable: str  # the variable that states the number of processes
    size: int  # number of processes
    rank: int  # the rank of this process
    shares_output: bool = True  # whether the processes of one host write to the same place


def stated_launch(environ: Mapping[str, str] = os.environ) -> Launch | None:
    """Return what the innermost launcher of this process states, or None without a launcher."""
    only_worlds = is_elastic(environ)
    for launcher, size_name, rank_name in _VARIABLES[:1] if only_worlds else _VARIABLES:
        size, rank = environ.get(size_name, ""), environ.get(rank_name, "")
        if not size.isdecimal() or not rank.isdecimal() or int(rank) >= int(size):
            continue
        if launcher == TORCHRUN and "TORCHELASTIC_RUN_ID" not in environ:
            continue
        # srun --pty started a shell in a terminal: what is typed there may be one worker, or mpirun
        is_shell = any(name.startswith("SLURM_PTY_") for name in environ)
        if launcher == SRUN and (is_shell or _is_batch_script()):
            continue
        if size_name == "PMI_SIZE" and environ.get("SLURM_STEP_NUM_TASKS") == size:
            continue  # srun --mpi=pmi2
        one_per_host = launcher == _UNKNOWN and "LOCAL_RANK" not in environ  # such as pods of Kubernetes
        return Launch(launcher, size_name, int(size), int(rank), not one_per_host)
    if only_worlds:
        return None
    if launch := _launch_of_tensorflow(environ):
        return launch
    # PMIx has no variable for the size: a rank above 0 has others before it
    rank = environ.get("PMIX_RANK", "")
    return Launch("a launcher with PMIx", "PMIX_RANK", int(rank) + 1, int(rank)) if rank.isdecimal() else None


def output_rank() -> int | None:
    """Return this worker's rank among those that share its output; None if it has an output of its own."""
    rank = launched_rank()
    if rank is not None:
        return rank
    launch = stated_launch()
    return launch.rank if launch is not None and launch.size > 1 and launch.shares_output else None


def check_launch_is_seen(launch: Launch | None, size: int, rank: int, build: str = "") -> None:
    """Check that Horovod sees the processes that a launcher states."""
    if launch is None or launch.size <= 1:
        return
    # an unknown launcher's variables may be left from elsewhere: they say nothing if workers found each other
    is_seen = size > 1 if launch.launcher == _UNKNOWN else size >= launch.size
    has_rank = size != launch.size or rank == launch.rank or launch.launcher == _UNKNOWN
    if is_seen and has_rank:
        return
    seen = "one worker" if size == 1 else f"{size} workers, with rank {rank} here"
    raise EnvironmentFault(
        f"{launch.launcher} started {launch.size} processes (by {launch.variable}), but Horovod sees {seen}: "
        "each process would train alone",
        _remedy(launch, build),
        everywhere=launch.variable != "PMIX_RANK" or launch.rank > 1,  # rank 0 of PMIx knows of no other
    )


def _is_batch_script() -> bool:
    """Return whether Slurm runs this process in a batch script, whose step variables are inherited."""
    with suppress(psutil.Error):
        daemon = next((one for one in psutil.Process().parents() if one.name() == "slurmstepd"), None)
        return daemon is not None and ".batch]" in " ".join(daemon.cmdline())
    return False


def _launch_of_tensorflow(environ: Mapping[str, str]) -> Launch | None:
    """Return what TF_CONFIG states, with which somebody starts a process on each host."""
    with suppress(ValueError, TypeError, KeyError, AttributeError):
        config = json.loads(environ.get("TF_CONFIG", ""))
        size = sum(len(config["cluster"].get(kind) or []) for kind in ("chief", "master", "worker"))
        return Launch(_UNKNOWN, "TF_CONFIG", size, int(config["task"]["index"]), shares_output=False)
    return None


def _remedy(launch: Launch, build: str) -> str:
    count = launch.size if launch.variable != "PMIX_RANK" else "N"
    start = f"Start with `horovodrun -np {count} python -m hvdtrain ...`"
    over_mpi = launch.launcher in (MPIRUN, SRUN)
    if over_mpi and not build:
        over_gloo, build_it = start.replace("horovodrun", "horovodrun --gloo"), "build-horovod --mpi require"
        return f"{over_gloo}, or install an MPI and run `python -m hvdtrain {build_it}`: Horovod has none."
    if over_mpi and os.environ.get("HOROVOD_CONTROLLER", "").lower() == "gloo":
        return f"Unset HOROVOD_CONTROLLER, which hides MPI from Horovod. {start}, or with {launch.launcher}."
    if launch.launcher == SRUN:
        return "Start with `srun --mpi=pmix`; `hvdtrain docs clusters` says what else works."
    if build:
        start += f", or with the mpirun of {build}, which Horovod was built with"
    unset = "TF_CONFIG" if launch.variable == "TF_CONFIG" else "WORLD_SIZE and RANK"
    one = f" If one worker is meant, unset {unset}." if launch.launcher == _UNKNOWN else ""
    return f"{start}.{one}"


def check_is_not_launched(command: str, arguments: str = "...") -> None:
    """Check that no launcher started this process, for a command that launches workers itself."""
    launch = stated_launch()
    if launched_rank() is not None or (launch is not None and launch.size > 1):
        raise UsageError(
            f"{command} launches workers itself, but a launcher has started this process",
            f"Run it without the launcher: python -m hvdtrain {command} {arguments}",
            everywhere=True,
        )
