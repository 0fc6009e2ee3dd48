"""Processes that a worker starts: what they inherit, how they stay out of its way and end with it."""

import ctypes
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# the signals that a worker handles: what it starts ignores them
HANDLED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
_NICENESS = 19
_PR_SET_PDEATHSIG = 1
# what launchers tell their workers: a process beside one is none
_OF_LAUNCHERS = (
    *("HOROVOD_", "HVDTRAIN_ELASTIC", "HVDTRAIN_WORKER", "HVDTRAIN_SLOT"),
    *("OMPI_", "PMIX_", "PMI_", "PRTE_"),
)


def side_environment() -> dict[str, str]:
    """Return the environment of such a process: the job's, without what a launcher tells a worker."""
    found = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    path = [str(Path(__file__).parents[2]), *filter(None, [found.get("PYTHONPATH")])]
    # no file in the working directory takes the place of a library
    return {**found, "OMP_NUM_THREADS": "1", "PYTHONSAFEPATH": "1", "PYTHONPATH": os.pathsep.join(path)}


def end_with_parent(parent: int | None, number: int = signal.SIGTERM) -> None:
    """Have the kernel send this process a signal when the thread ends that started it.

    Args:
        parent: the process that started this one, which ends at once if the other has ended already;
            None if that cannot be.
        number: the signal.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(number))
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def own_output() -> Callable[[str], None]:
    """Keep standard output for what the worker reads; what libraries print goes to standard error.

    Returns:
        What writes a line of text to the worker, which need not read it.
    """
    output = os.dup(1)
    os.dup2(2, 1)
    os.set_blocking(output, False)

    def say(text: str) -> None:
        with suppress(OSError):  # the job is gone, or does not read
            os.write(output, (" ".join(text.split()) + "\n").encode())

    return say


def stay_out_of_the_way() -> None:
    """Leave the cores to training: a launcher may have bound the job, and so this process, to one of them."""
    with suppress(OSError):
        os.nice(_NICENESS)
    with suppress(OSError):
        os.sched_setaffinity(0, range(os.cpu_count() or 1))
