"""What a worker of an elastic job tells its driver of itself: who it is, its values, its error."""

import errno
import json
import os
from collections.abc import Iterator, Mapping
from hashlib import blake2b, sha256
from typing import Any, Literal

import psutil

from hvdtrain.elastic.messages import MAX_LINE_BYTES, MAX_TEXT, Failed, Hello, Values
from hvdtrain.elastic.watch.connections import machine_id
from hvdtrain.errors import (
    AgreementError,
    EnvironmentFault,
    ExchangeError,
    HvdtrainError,
    Interrupted,
    PeerLostError,
    SaveError,
    WorkerFailure,
)
from hvdtrain.host.launcher import SLOT_VARIABLE, host_name

Blame = Literal["code", "environment", "peer"]

# where a launcher says which of its host's workers this is
_SLOT_VARIABLES = (SLOT_VARIABLE, "SLURM_LOCALID", "OMPI_COMM_WORLD_LOCAL_RANK")
_MAX_VALUE = 4096
# a file or a connection of this host failed; the same code may work on another host
_OF_THE_HOST = {
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.ESTALE,
    errno.ENOMEM,
    errno.ENODEV,
    errno.ETIMEDOUT,
}


def hello(environ: Mapping[str, str]) -> Hello:
    """Return the first message of this worker."""
    slots = [environ[name] for name in _SLOT_VARIABLES if environ.get(name, "").isdecimal()]
    return Hello(
        host=host_name(environ),
        machine=machine_id(),
        pid=os.getpid(),
        process_seconds=psutil.Process().create_time(),
        slot=int(slots[0]) if slots else None,
    )


def value_texts(values: Mapping[str, Any]) -> dict[str, str]:
    """Return values as texts, by name; a long one is cut and has a digest of the whole at its end."""
    return {_cut(name): _cut(repr(value)) for name, value in sorted(values.items())}


def digest_of(values: Mapping[str, Any]) -> str:
    """Return a digest that is equal if the values are."""
    texts = sorted((name, repr(value)) for name, value in values.items())
    return blake2b(repr(texts).encode(errors="backslashreplace"), digest_size=16).hexdigest()


def values_in_parts(values: Mapping[str, str]) -> list[Values]:
    """Return messages with texts by name, none of which is too long for a line."""
    parts = list(_parts(values))
    return [Values(part=number, of=len(parts), values=part) for number, part in enumerate(parts)]


def failure_of(error: BaseException) -> Failed:
    """Return what the driver is told of an error that ends this worker."""
    if isinstance(error, HvdtrainError):
        problem, remedy = error.problem, error.remedy
    elif isinstance(error, Interrupted):
        problem, remedy = f"interrupted by {error}", ""
    else:
        problem, remedy = f"{type(error).__name__}: {error}", ""
    return Failed(
        blame=blame_for(error),
        problem=sendable(problem),
        remedy=sendable(remedy),
        exit_code=getattr(error, "exit_code", 1),
    )


def blame_for(error: BaseException) -> Blame:
    """Return whose error it is: "code" ends the job, after the others the job goes on without this worker.

    What every worker raises alike would come again, so it counts as code. So does what the task's code
    raises, unless its cause is the memory, a disk or a network of this host.
    """
    if isinstance(error, PeerLostError):
        return "peer"
    cause = error.__cause__ if isinstance(error, WorkerFailure) else error
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _OF_THE_HOST):
        return "environment"
    if isinstance(error, AgreementError | ExchangeError | SaveError) or getattr(error, "everywhere", False):
        return "code"
    return "environment" if isinstance(error, EnvironmentFault | OSError | Interrupted) else "code"


def sendable(text: str) -> str:
    """Return a text that a message can hold: without what UTF-8 cannot encode, and not too long."""
    return text[:MAX_TEXT].encode(errors="backslashreplace").decode()[:MAX_TEXT]


def _cut(text: str) -> str:
    text = text.encode(errors="backslashreplace").decode()
    if len(text) <= _MAX_VALUE:
        return text
    return f"{text[:_MAX_VALUE]}... (SHA-256 of the whole: {sha256(text.encode()).hexdigest()[:16]})"


def _parts(values: Mapping[str, str]) -> Iterator[dict[str, str]]:
    part: dict[str, str] = {}
    size = 0
    for name, text in values.items():
        more = len(json.dumps([name, text]))
        if part and size + more > MAX_LINE_BYTES // 2:
            yield part
            part, size = {}, 0
        part[name] = text
        size += more
    yield part
