"""Objects that workers send one another: JSON of known types, so that nothing that arrives is executed.

A message is a JSON text and the bytes of arrays after it. What JSON lacks is an object with one key, its tag.
A class travels by its name, and is found only among the classes that are marked by ``wire_types.travels`` and
the errors of hvdtrain.
"""

import dataclasses
import json
import math
import re
import struct
from collections.abc import Callable, Iterable
from enum import IntEnum
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel

from hvdtrain import errors
from hvdtrain.errors import ExchangeError, HvdtrainError
from hvdtrain.workers.wire_types import TYPES

MAX_DEPTH = 64
MAX_TEXT_BYTES = 1 << 25  # of the JSON text; a list of 10,000 parameters with their shapes takes 1 MB

_HEAD = struct.Struct("<4sQ")
_MAGIC = b"hvd1"
_DTYPE = re.compile(r"[<>|=]?[biufcSUmM][1-9]\d*(\[\d*\w+\])?|bfloat16|float8_\w+|u?int[24]")
_JSON = (type(None), bool, int, float, str)  # what JSON has
_CONTAINERS: dict[str, Callable[[Any], Any]] = {
    "tuple": tuple, "set": set, "frozenset": frozenset, "dict": dict, "path": Path,
}  # fmt: skip


def encode(value: Any) -> bytes:
    """Return a value as a message."""
    buffers: list[bytes] = []
    try:
        text = json.dumps(_written(value, buffers), separators=(",", ":")).encode("ascii")
    except ValueError as error:  # an integer of more digits than Python writes
        raise _refusal(str(error)) from None
    if len(text) > MAX_TEXT_BYTES:
        raise ExchangeError(f"an object for other workers takes {len(text):,} bytes, of {MAX_TEXT_BYTES:,}")
    return b"".join((_HEAD.pack(_MAGIC, len(text)), text, *buffers))


def decode(message: bytes | memoryview, sender: str = "another worker") -> Any:
    """Return the value of a message, of which everything is checked."""
    try:
        return _Reader(memoryview(message)).value()
    except Exception as error:  # a constructor may raise anything where a field has another type
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ExchangeError(
            f"{sender} sent what no worker of this version sends: {reason[:200]}",
            "Give every worker the same version of hvdtrain. If they have, another program joined the job.",
        ) from None


def _written(value: Any, buffers: list[bytes], depth: int = 0) -> Any:
    """Return a value as what JSON has; the bytes in it are added to the buffers."""
    kind = type(value)
    if kind in _JSON:
        return value
    if depth > MAX_DEPTH:
        raise _refusal(f"something deeper than {MAX_DEPTH} levels")

    def inner(values: Iterable[Any]) -> list[Any]:
        return [_written(one, buffers, depth + 1) for one in values]

    if kind in (list, tuple, set, frozenset):
        return inner(value) if kind is list else {kind.__name__: inner(value)}
    if kind is dict:  # in the order of the buffers, and a pair is no level of its own
        flat = inner(chain.from_iterable(value.items()))
        return {"dict": list(zip(flat[::2], flat[1::2], strict=True))}
    if kind is bytes or kind in (np.ndarray, np.memmap) or isinstance(value, np.generic):
        return _buffered(value, buffers)
    return _object(value, inner)


def _buffered(value: Any, buffers: list[bytes]) -> Any:
    """Return bytes or an array by its size, and by its dtype and shape; the buffers have the rest."""
    data = value if type(value) is bytes else value.tobytes()
    buffers.append(data)
    if type(value) is bytes:
        return {"bytes": len(data)}
    name = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
    if not _DTYPE.fullmatch(name):
        raise _refusal(f"an array that has the dtype {value.dtype}")
    tag = "scalar" if isinstance(value, np.generic) else "array"
    return {tag: [name, list(value.shape), len(data)]}


def _object(value: Any, inner: Callable[[Iterable[Any]], list[Any]]) -> Any:
    """Return a path, an error of hvdtrain, or an object of a class that travels."""
    kind = type(value)
    if isinstance(value, IntEnum):  # arrives as a plain number
        return int(value)
    if kind is type(Path()):
        return {"path": str(value)}
    if isinstance(value, HvdtrainError):
        name = next(cls.__name__ for cls in kind.__mro__ if cls.__module__ == errors.__name__)
        return {"error": [name, value.problem, value.remedy, value.everywhere]}
    if TYPES.get(kind.__name__) is not kind:
        raise _refusal(f"a {kind.__module__}.{kind.__qualname__}")
    is_model = issubclass(kind, BaseModel)
    names = list(kind.model_fields) if is_model else [one.name for one in dataclasses.fields(kind)]
    return {"object": [kind.__name__, names, inner(getattr(value, name) for name in names)]}


def _refusal(found: str) -> ExchangeError:
    return ExchangeError(
        f"what this worker sends to the others cannot travel: {found}",
        "Numbers, texts, bytes, arrays of numbers, lists, tuples, sets and dicts of them can.",
    )


class _Reader:
    """Turns a message into its value."""

    def __init__(self, message: memoryview) -> None:
        magic, size = _HEAD.unpack_from(message)
        if magic != _MAGIC:
            raise ValueError(f"a message that starts with {bytes(message[:8])!r}")
        if size > min(MAX_TEXT_BYTES, len(message) - _HEAD.size):
            raise ValueError(f"a text of {size:,} bytes in a message of {len(message):,}")
        self._text = bytes(message[_HEAD.size : _HEAD.size + size])
        self._rest = message[_HEAD.size + size :]

    def value(self) -> Any:
        value = json.loads(self._text.decode("ascii"), object_hook=self._made)  # from the innermost on
        if len(self._rest):
            raise ValueError(f"{len(self._rest):,} bytes too many")
        return value

    def _made(self, written: dict[str, Any]) -> Any:
        ((tag, content),) = written.items()
        if make := _CONTAINERS.get(tag):
            return make(content)
        if tag == "bytes":
            return bytes(self._take(content))
        if tag in ("array", "scalar"):
            array = self._array(*content)
            return array if tag == "array" else array[()]
        if tag == "object":
            name, names, values = content
            return TYPES[name](**dict(zip(names, values, strict=True)))
        if tag == "error":
            return _error(*content)
        raise ValueError(f"the unknown tag {tag[:40]!r}")

    def _array(self, name: str, shape: list[int], size: int) -> Any:
        if not _DTYPE.fullmatch(name):
            raise ValueError(f"the dtype {name[:40]!r}")
        dtype = np.dtype(name)
        if size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{size} bytes for {name} {shape}")
        data = self._take(size)
        array = np.ndarray(shape, dtype)  # its own memory: aligned, and writable
        array.reshape(-1).view(np.uint8)[...] = data
        return array

    def _take(self, size: int) -> memoryview:
        if not 0 <= size <= len(self._rest):
            raise ValueError(f"{size} bytes where {len(self._rest):,} are left")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _error(name: str, problem: str, remedy: str, everywhere: bool) -> HvdtrainError:
    cls = getattr(errors, name, None)
    if not (isinstance(cls, type) and issubclass(cls, HvdtrainError) and isinstance(problem + remedy, str)):
        raise ValueError(f"the unknown error {name[:40]!r}")
    return cls(problem, remedy, everywhere=bool(everywhere))
