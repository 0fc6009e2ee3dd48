"""Reader processes: they fetch samples for one worker, beside it."""

import os
import queue
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import hvdtrain
from hvdtrain.data.bad_samples import Fetch, Fetched, LocalFetch
from hvdtrain.data.handover import Parcel
from hvdtrain.data.messages import receive, send
from hvdtrain.data.reader_process import SIGNALS, Problem
from hvdtrain.errors import EnvironmentFault, TrainingError

_CLOSE_SECONDS = 1.0
# a reader has one thread: the workers' own threads have the cores
_ONE_THREAD = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "TF_NUM_INTRAOP_THREADS",
    "TF_NUM_INTEROP_THREADS",
)

# not ``-m``: what travels is of the module's classes, not of those of ``__main__``
_PROGRAM = """
import sys
sys.path.append(sys.argv.pop())
from hvdtrain.data.reader_process import main
main(*map(int, sys.argv[1:]))
"""
_ROOT = Path(hvdtrain.__file__).resolve().parent.parent


class Readers:
    """What reads the samples of one worker: some processes, or none and it does so itself.

    A context manager: leaving it ends the processes. They end by themselves where the worker ends in
    any other way. Training and evaluation share them.

    Args:
        datasets: data sets by name.
        processes: how many; 0 for none.
        skip: whether the next readable sample stands in for one that cannot be read.

    Raises:
        TaskError: where a data set cannot be handed to another process.
    """

    def __init__(self, datasets: Mapping[str, Any], processes: int = 0, skip: bool = False) -> None:
        self._datasets = datasets
        self._skip = skip
        self._all: list[_Process] = []
        self._idle: queue.SimpleQueue[_Process] = queue.SimpleQueue()
        if processes == 0:
            return
        with Parcel(datasets) as parcel:
            try:
                for _ in range(processes):
                    self._all.append(_Process(parcel, skip))
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
        """The ids of the processes."""
        return [process.pid for process in self._all]

    def fetch_from(self, name: str) -> Fetch:
        """Give the function that fetches samples of a data set; any number of threads may call it."""
        if not self._all:
            return LocalFetch(self._datasets[name], self._skip)
        return lambda indices, keys: self._fetch(name, indices, keys)

    def close(self) -> None:
        """End the processes."""
        for process in self._all:
            process.let_go()
        deadline = time.monotonic() + _CLOSE_SECONDS
        for process in self._all:
            process.end(deadline - time.monotonic())
        self._all.clear()

    def _fetch(self, name: str, indices: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Fetched:
        # any process gives the same samples, so the one that is free does it
        process = self._idle.get()
        try:
            return process.fetch(name, indices, keys)
        finally:
            self._idle.put(process)


class _Process:
    """One reader process, seen from its worker."""

    def __init__(self, parcel: Parcel, skip: bool) -> None:
        self._connection, theirs = socket.socketpair()
        number = theirs.fileno()
        numbers = (number, parcel.descriptors[0], os.getpid(), int(skip))
        # between its start and its first line it would die of a signal that is meant for the worker
        before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", _PROGRAM, *map(str, numbers), str(_ROOT)],
                    env=os.environ | dict.fromkeys(_ONE_THREAD, "1"),
                    stdin=subprocess.DEVNULL,
                    pass_fds=(number, *parcel.descriptors),
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._is_open = False

    @property
    def pid(self) -> int:
        return self._process.pid

    def fetch(self, name: str, indices: NDArray[np.int64], keys: NDArray[np.uint64] | None) -> Fetched:
        try:
            if not self._is_open:
                self._receive()  # whether it could open the data sets
                self._is_open = True
            send(self._connection, (name, indices, keys))
            fetched: Fetched = self._receive()
        except (EOFError, OSError):
            raise self._death() from None
        return fetched

    def let_go(self) -> None:
        """Tell the process that nothing more is wanted."""
        with suppress(OSError):  # it may be gone
            self._connection.shutdown(socket.SHUT_RDWR)

    def end(self, seconds: float) -> None:
        """Wait for the process to end, or end it."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._connection.close()

    def _receive(self) -> Any:
        answer = receive(self._connection)
        if isinstance(answer, Problem):
            raise answer.as_error()
        return answer

    def _death(self) -> Exception:
        who = f"reader process {self.pid}"
        try:
            code = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            return TrainingError(f"{who} closed its connection")
        if code == -signal.SIGKILL:
            return EnvironmentFault(
                f"{who} was killed (SIGKILL) while it read samples",
                "The kernel does so where memory runs out: its log says so. Use fewer --read-workers, "
                "or memory-mapped data.",
            )
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        return TrainingError(f"{who} {how} while it read samples", "Try --read-workers 0 to see where.")
