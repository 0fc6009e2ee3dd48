"""Objects of all workers in one message: each worker's is framed, so that one collective moves them all."""

import struct
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import ExchangeError
from hvdtrain.workers import wire

GATHER = -1  # in place of the root of a broadcast

# what the worker calls, whether it has an error in place of an object, and the length
_HEAD = struct.Struct("<i?Q")


def frame(purpose: int, value: Any) -> NDArray[np.uint8]:
    """Return a worker's object as bytes to send.

    An object that cannot travel is replaced by the error: the worker must take part in the collective, for
    which the others wait.

    Args:
        purpose: the root of a broadcast, or ``GATHER``.
        value: the object.
    """
    failure: ExchangeError | None = None
    try:
        message = wire.encode(value)
    except ExchangeError as error:
        failure = error
    except Exception as error:
        failure = ExchangeError(f"an object for the other workers cannot be encoded: {error!r}")
    if failure is not None:
        message = wire.encode(failure)
    data = bytearray(_HEAD.pack(purpose, failure is not None, len(message)))
    data += message
    return np.frombuffer(data, np.uint8)


def messages_in(joined: NDArray[np.uint8], size: int, purpose: int) -> list[memoryview]:
    """Return the encoded objects of all workers, in the order of ranks.

    Args:
        joined: the frames of all workers.
        size: number of workers.
        purpose: what this worker calls.

    Raises:
        ExchangeError: On every worker alike, if one sent something else or has an object that cannot travel.
    """
    rest, messages = joined.data, []
    failure: ExchangeError | None = None
    for rank in range(size):
        if len(rest) < _HEAD.size:
            raise _unexpected(rank, f"{len(rest)} bytes")
        found, is_error, length = _HEAD.unpack_from(rest)
        rest = rest[_HEAD.size :]
        if length > len(rest):
            raise _unexpected(rank, f"a length of {length:,} bytes where {len(rest):,} are left")
        if found != purpose:
            raise _unexpected(rank, f"{_name(found)} where this worker has {_name(purpose)}")
        message, rest = rest[:length], rest[length:]
        if is_error and failure is None:
            failure = _read_error(rank, message)
        messages.append(message)
    if len(rest):
        raise _unexpected(size - 1, f"{len(rest):,} bytes too many")
    if failure is not None:
        raise failure
    return messages


def _name(purpose: int) -> str:
    return "a gathering of objects" if purpose == GATHER else f"a broadcast from rank {purpose}"


def _read_error(rank: int, message: memoryview) -> ExchangeError:
    error = wire.decode(message, f"rank {rank}")
    if not isinstance(error, ExchangeError):
        return _unexpected(rank, "an error of another kind")
    return ExchangeError(f"{error.problem} (on rank {rank})", error.remedy, everywhere=True)


def _unexpected(rank: int, found: str) -> ExchangeError:
    return ExchangeError(
        f"what arrived from rank {rank} is not what the workers exchange here: {found}",
        "Every worker must make the same calls in the same order, with the same version of hvdtrain. If they "
        "do, another program joined the job.",
    )
