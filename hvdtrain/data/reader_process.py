"""The program of a reader process: it fetches samples for one worker and ends with that worker.

``readers.py`` starts it. It loads neither a framework nor Horovod unless the data set does.
"""

import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from hvdtrain.data.bad_samples import LocalFetch
from hvdtrain.data.ipc import receive, send
from hvdtrain.data.numeric import set_float_bits
from hvdtrain.data.serialization import load_payload
from hvdtrain.errors import HvdtrainError
from hvdtrain.host.processes import HANDLED, end_with_parent
from hvdtrain.workers.user_errors import RaisedInReader, where_raised


@dataclass(frozen=True)
class RemoteError:
    """An exception in a form that can be sent to the worker.

    An error of hvdtrain is raised there unchanged. Of any other exception, which may not be
    possible to unpickle, only the text is sent.

    Attributes:
        kind: the class of an error of hvdtrain; None for any other exception.
        problem: its message; for any other exception, with the place that raised it.
        remedy: its remedy; for any other exception, its traceback.
        everywhere: that of ``HvdtrainError``.
    """

    kind: type[HvdtrainError] | None
    problem: str
    remedy: str
    everywhere: bool = False

    @classmethod
    def from_exception(cls, error: BaseException) -> "RemoteError":
        """Return an exception in this form; to be called where it is caught."""
        if isinstance(error, HvdtrainError):
            return cls(type(error), error.problem, error.remedy, error.everywhere)
        return cls(None, where_raised(error), "".join(traceback.format_exception(error)))

    def to_exception(self) -> Exception:
        """Return the exception to raise in the worker."""
        if self.kind is None:
            return RaisedInReader(self.problem, self.remedy)
        return self.kind(self.problem, self.remedy, everywhere=self.everywhere)


def main(connection_number: int, payload_number: int, worker: int, skip: bool) -> None:
    """Serve one worker's requests until it closes the connection, then end the process.

    Args:
        connection_number: descriptor of the socket to the worker.
        payload_number: first descriptor of the payload with the data sets.
        worker: the worker's process id.
        skip: whether the next readable sample replaces one that cannot be read.
    """
    _end_with_worker(worker)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the worker has closed the connection
        _serve(socket.socket(fileno=connection_number), payload_number, skip)
    sys.stdout.flush()
    os._exit(0)  # without clean-up, which a thread of the data set could block


def _serve(connection: socket.socket, payload_number: int, skip: bool) -> None:
    """Load the data sets and fetch samples until the worker closes the connection."""
    try:
        datasets = load_payload(payload_number)
    except BaseException as error:
        send(connection, RemoteError.from_exception(error))
        return
    send(connection, None)
    while True:
        name, indices, keys, bits = receive(connection)
        set_float_bits(bits)
        send(connection, _fetch(datasets[name], indices, keys, skip))


def _fetch(dataset: Any, indices: Any, keys: Any, skip: bool) -> Any:
    """Return the samples, or the exception that was raised instead."""
    try:
        return LocalFetch(dataset, skip)(indices, keys)
    except BaseException as error:
        return RemoteError.from_exception(error)


def _end_with_worker(worker: int) -> None:
    """Ignore the signals that the worker handles, and have the kernel end this process with the worker."""
    for number in HANDLED:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)  # the worker started this process with them blocked
    end_with_parent(worker, signal.SIGKILL)
