"""Reader processes: each worker can have some that fetch its samples."""

import os
import queue
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hvdtrain
from hvdtrain.data.datasets import fetch, stack
from hvdtrain.data.numeric import float_bits, set_float_bits
from hvdtrain.data.serialization import Payload, load_payload, receive, send
from hvdtrain.errors import BadSampleError, DataError, EnvironmentFault, HvdtrainError, TrainingError
from hvdtrain.host.processes import HANDLED, end_with_parent
from hvdtrain.task import Arrays
from hvdtrain.workers.user_errors import RaisedInReader, where_raised

# if so many samples in a row cannot be read, the data set is at fault
_MOST_IN_A_ROW = 100


@dataclass(frozen=True, slots=True)
class BadSample:
    """A sample that could not be read, and the one that replaces it."""

    place: int  # its position among the samples that were fetched together
    index: int  # its index in the data set
    replacement_index: int  # index of the next readable sample
    problem: str  # the message of the data set's error


Fetched = tuple[Arrays, list[BadSample]]
# fetches samples, stacked, by their indices and the seeds of their augmentation
Fetch = Callable[[NDArray[np.int64], NDArray[np.uint64] | None], Fetched]


@dataclass(frozen=True)
class LocalFetch:
    """Fetches samples in this process."""

    dataset: Any
    skip: bool = False

    def __call__(self, indices: NDArray[np.int64], keys: NDArray[np.uint64] | None = None) -> Fetched:
        """Fetch samples, stacked. The replacement of one depends on its index alone."""
        try:
            return fetch(self.dataset, indices, keys), []
        except BadSampleError:
            if not self.skip:
                raise
        rows, used, bad = [], [], []
        for place, index in enumerate(indices):
            row, replacement_index, problem = self._first_readable(int(index), keys, place)
            rows.append(row)
            used.append(replacement_index)
            if problem:
                bad.append(BadSample(place, int(index), replacement_index, problem))
        if hasattr(self.dataset, "collated"):
            return fetch(self.dataset, np.asarray(used)), bad
        return stack(rows, np.asarray(used)), bad

    def _first_readable(
        self, index: int, keys: NDArray[np.uint64] | None, place: int
    ) -> tuple[Arrays, int, str]:
        """Return a sample or the next readable one, its index, and the message of the first error."""
        problem, size = "", len(self.dataset)
        key = None if keys is None else keys[place : place + 1]
        tries = min(size, _MOST_IN_A_ROW)
        for candidate in range(index, index + tries):
            try:
                arrays = fetch(self.dataset, np.asarray([candidate % size]), key)
                return {name: array[0] for name, array in arrays.items()}, candidate % size, problem
            except BadSampleError as error:
                problem = problem or error.problem
        raise DataError(
            f"{tries} samples in a row cannot be read, from sample {index}: {problem}",
            "on_bad_sample: skip is meant for a few bad files; check the data set.",
        )


def _portable(error: BaseException) -> Exception:
    """Return an error of hvdtrain as it is, and any other, which may not be possible to unpickle, as text."""
    if isinstance(error, HvdtrainError):
        return error
    return RaisedInReader(where_raised(error), "".join(traceback.format_exception(error)))


def main(connection_number: int, payload_number: int, worker: int, skip: bool) -> None:
    """Serve one worker's requests until it closes the connection, then end the process."""
    for number in HANDLED:  # they are meant for the worker, which started this process with them blocked
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HANDLED)
    end_with_parent(worker, signal.SIGKILL)
    with suppress(EOFError, BrokenPipeError, ConnectionResetError):  # the worker has closed the connection
        _serve(Connection(connection_number), payload_number, skip)
    os._exit(0)  # without clean-up, which a thread of the data set could block


def _serve(connection: Connection, payload_number: int, skip: bool) -> None:
    """Load the data sets and fetch samples until the worker closes the connection."""
    try:
        datasets = load_payload(payload_number)
    except BaseException as error:
        send(connection, _portable(error))
        return
    send(connection, None)
    while True:
        name, indices, keys, bits = receive(connection)
        set_float_bits(bits)
        try:
            answer: Any = LocalFetch(datasets[name], skip)(indices, keys)
        except BaseException as error:
            answer = _portable(error)
        sys.stdout.flush()
        send(connection, answer)


_EXIT_SECONDS = 1.0
# a reader computes with one thread: the cores are for the workers' compute threads
_ONE_THREAD = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"),
    *("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS"),
)

# not with ``-m``: pickled objects refer to the module's classes, not to those of ``__main__``
_PROGRAM = """
import sys
sys.path.append(sys.argv.pop())
from hvdtrain.data.readers import main
main(*map(int, sys.argv[1:]))
"""
_ROOT = Path(hvdtrain.__file__).resolve().parent.parent


class Readers:
    """The reader processes of one worker: a context manager. They also end if the worker does."""

    def __init__(self, datasets: Mapping[str, Any], processes: int = 0, skip: bool = False) -> None:
        self._datasets = datasets
        self._skip = skip
        self._all: list[_Process] = []
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        if processes == 0:
            return
        with Payload(datasets) as payload:
            try:
                for _ in range(processes):
                    self._all.append(_Process(payload, skip))
            except BaseException:
                self.close()
                raise
        for process in self._all:
            self._idle.put(process)

    def __enter__(self) -> "Readers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pids(self) -> list[int]:
        """Process ids of the readers."""
        return [process.pid for process in self._all]

    def fetch_from(self, name: str) -> Fetch:
        """Return a function that fetches samples of a data set; any number of threads may call it."""
        if not self._all:
            return LocalFetch(self._datasets[name], self._skip)

        def fetch(indices: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Fetched:
            process = self._idle.get()  # all give the same samples, so any idle one will do
            try:
                return process.fetch(name, indices, keys)
            finally:
                self._idle.put(process)

        return fetch

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.end()
        self._all.clear()


class _Process:
    """One reader process, as its worker uses it."""

    def __init__(self, payload: Payload, skip: bool) -> None:
        self._connection, theirs = Pipe()
        numbers = (theirs.fileno(), payload.descriptor, os.getpid(), int(skip))
        # blocked until its first line: a signal that is meant for the worker would end it
        before = signal.pthread_sigmask(signal.SIG_BLOCK, HANDLED)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *map(str, numbers), str(_ROOT)],
                    env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
                    stdin=subprocess.DEVNULL,
                    pass_fds=numbers[:2],
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_ready = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def fetch(self, name: str, indices: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Fetched:
        try:
            if not self._is_ready:
                self._receive()  # raises if it could not load the data sets
                self._is_ready = True
            send(self._connection, (name, indices, keys, float_bits()))
            fetched: Fetched = self._receive()
            return fetched
        except (EOFError, OSError):
            who = f"reader process {self.pid}"
        try:
            code = self._process.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            raise TrainingError(f"{who} closed its connection") from None
        if code == -signal.SIGKILL:
            raise EnvironmentFault(
                f"{who} was killed (SIGKILL) while it read samples",
                "The kernel does so when memory runs out; its log says so. Use fewer --read-workers, "
                "or memory-mapped data.",
            )
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        raise TrainingError(f"{who} {how} while it read samples", "Try --read-workers 0 to see where.")

    def end(self) -> None:
        """Kill the process: between samples it has nothing to finish. Who waits for one gets an EOFError."""
        self._process.kill()
        self._process.wait()
        self._connection.close()

    def _receive(self) -> Any:
        answer = receive(self._connection)
        if isinstance(answer, Exception):
            raise answer
        return answer
