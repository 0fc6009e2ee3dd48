"""A reader process: fetches samples for one worker until that worker is gone.

``readers.py`` starts it. It loads neither a framework nor Horovod, unless the data set does.
"""

import ctypes
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvdtrain.data.bad_samples import LocalFetch
from hvdtrain.data.handover import unpack
from hvdtrain.data.messages import receive, send
from hvdtrain.errors import HvdtrainError
from hvdtrain.task import RaisedInReader, where_raised

# what a worker acts on, and its readers leave to it
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Problem:
    """An exception on its way to the worker; of a user's own, only what it said can travel.

    Attributes:
        kind: the class of an error of hvdtrain; None for another.
        problem: what it said; the place, too, for another's.
        remedy: the remedy; the traceback for another's.
        everywhere: as ``HvdtrainError`` has it.
    """

    kind: type[HvdtrainError] | None
    problem: str
    remedy: str
    everywhere: bool = False

    @classmethod
    def of(cls, error: Exception) -> "Problem":
        """Say an exception, where it was caught."""
        if isinstance(error, HvdtrainError):
            return cls(type(error), error.problem, error.remedy, error.everywhere)
        return cls(None, where_raised(error), "".join(traceback.format_exception(error)))

    def as_error(self) -> Exception:
        """Give the exception to raise in the worker."""
        if self.kind is None:
            return RaisedInReader(self.problem, self.remedy)
        return self.kind(self.problem, self.remedy, everywhere=self.everywhere)


def main(connection_number: int, parcel_number: int, worker: int, skip: bool) -> None:
    """Answer one worker's wishes; does not return.

    Args:
        connection_number: descriptor of the socket to the worker.
        parcel_number: first descriptor of the parcel with the data sets.
        worker: the worker's process id.
        skip: whether the next readable sample stands in for one that cannot be read.
    """
    _live_and_die_with(worker)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the worker is done
        _serve(socket.socket(fileno=connection_number), parcel_number, skip)
    sys.stdout.flush()
    os._exit(0)  # no clean-up that a thread of the data set could hold up


def _serve(connection: socket.socket, parcel_number: int, skip: bool) -> None:
    """Open the data sets and fetch what is asked for, until the worker closes the connection."""
    try:
        datasets = unpack(parcel_number)
    except Exception as error:
        send(connection, Problem.of(error))
        return
    send(connection, None)
    while True:
        name, indices, keys = receive(connection)
        send(connection, _answer(datasets[name], indices, keys, skip))


def _answer(dataset: Any, indices: Any, keys: Any, skip: bool) -> Any:
    try:
        return LocalFetch(dataset, skip)(indices, keys)
    except Exception as error:
        return Problem.of(error)


def _live_and_die_with(worker: int) -> None:
    """Leave signals to the worker, and end when it ends, however that is."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # the worker started this process with them blocked
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != worker:  # it ended before the line above
        os._exit(1)
