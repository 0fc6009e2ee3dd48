"""Objects that workers send one another: JSON of known types, so that nothing that arrives is executed.

A message is a JSON text and the bytes of strings and arrays after it. What JSON lacks is an object with one
key, its tag. A class travels by its name, and is found only among the classes that are marked by
``wire_types.travels`` and the errors of hvdtrain. A value arrives as it was, with every bit of a float.
"""

import dataclasses
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
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
_DOUBLE = struct.Struct("<d")
_JSON_INT = 1 << 63  # integers from here on travel in hexadecimal: Python reads few decimal digits
_DTYPE = re.compile(r"[<>|=]?[biufcSUmM][1-9]\d*(\[\d*\w+\])?|bfloat16|float8_\w+|u?int[24]")


def encode(value: Any) -> bytes:
    """Return a value as a message."""
    writer = _Writer()
    text = json.dumps(writer.write(value), allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_TEXT_BYTES:
        raise ExchangeError(f"an object for other workers takes {len(text):,} bytes, of {MAX_TEXT_BYTES:,}")
    return b"".join((_HEAD.pack(_MAGIC, len(text)), text, *writer.buffers))


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


class _Writer:
    """Turns values into what JSON has; bytes are put aside."""

    def __init__(self) -> None:
        self.buffers: list[bytes] = []
        self._depth = 0

    def write(self, value: Any) -> Any:
        kind = type(value)
        if (method := _METHODS.get(kind)) is not None:
            return method(self, value)
        if isinstance(value, HvdtrainError):
            name = next(cls.__name__ for cls in kind.__mro__ if cls.__module__ == errors.__name__)
            return {"error": [name, *map(self.text, (value.problem, value.remedy)), value.everywhere]}
        if isinstance(value, IntEnum):  # arrives as a plain number
            return self.integer(int(value))
        if isinstance(value, np.generic):
            return {"scalar": self._numbers(value)}
        if TYPES.get(kind.__name__) is kind:
            fields = kind.model_fields if issubclass(kind, BaseModel) else _names_of(kind)
            return {"object": [kind.__name__, self.pairs((name, getattr(value, name)) for name in fields)]}
        raise _refusal(f"a {kind.__module__}.{kind.__qualname__}")

    def integer(self, value: int) -> Any:
        return value if abs(value) < _JSON_INT else {"int": f"{value:x}"}

    def number(self, value: float) -> Any:
        return value if math.isfinite(value) else {"float": _DOUBLE.pack(value).hex()}

    def text(self, value: str) -> Any:
        if value.isascii() or value.isprintable():
            return value
        # JSON joins two halves of a character, which Python keeps apart
        return {"text": self._put(value.encode("utf-8", "surrogatepass"))}

    def list(self, values: Any) -> Any:
        if self._depth > MAX_DEPTH:
            raise _refusal(f"something deeper than {MAX_DEPTH} levels")
        self._depth += 1
        written = [self.write(value) for value in values]
        self._depth -= 1
        return written

    def dict(self, values: Mapping[Any, Any]) -> Any:
        return {"dict": self.pairs(values.items())}

    def pairs(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        written = self.list(chain.from_iterable(pairs))  # a pair is no level of its own
        return [list(pair) for pair in zip(written[::2], written[1::2], strict=True)]

    def array(self, value: Any) -> Any:
        return {"array": self._numbers(value)}

    def bytes(self, value: Any) -> Any:
        return {"bytes": self._put(value)}

    def _numbers(self, value: Any) -> Any:
        name = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
        if not _DTYPE.fullmatch(name):
            raise _refusal(f"an array that has the dtype {value.dtype}")
        return [name, list(value.shape), self._put(value.tobytes())]

    def _put(self, data: Any) -> int:
        self.buffers.append(data)
        return len(data)


def _names_of(cls: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


def _refusal(found: str) -> ExchangeError:
    return ExchangeError(
        f"what this worker sends to the others cannot travel: {found}",
        "Numbers, texts, bytes, arrays of numbers, lists, tuples, sets and dicts of them can.",
    )


_METHODS: dict[type, Callable[[_Writer, Any], Any]] = {
    type(None): lambda _, value: value,
    bool: lambda _, value: value,
    int: _Writer.integer,
    float: _Writer.number,
    str: _Writer.text,
    bytes: _Writer.bytes,
    type(Path()): lambda writer, value: {"path": writer.text(str(value))},
    list: _Writer.list,
    tuple: lambda writer, value: {"tuple": writer.list(value)},
    set: lambda writer, value: {"set": writer.list(value)},
    frozenset: lambda writer, value: {"frozenset": writer.list(value)},
    dict: _Writer.dict,
    np.ndarray: _Writer.array,
    np.memmap: _Writer.array,
}


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
        text = self._text.decode("ascii")
        value = json.loads(text, object_hook=self._made, parse_constant=_refuse)  # from the innermost on
        if len(self._rest):
            raise ValueError(f"{len(self._rest):,} bytes too many")
        return value

    def _made(self, written: dict[str, Any]) -> Any:
        ((tag, content),) = written.items()
        made: Any
        match tag:
            case "tuple" | "set" | "frozenset":
                made = {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](_checked(content, list))
            case "dict":
                made = dict(_checked(pair, list) for pair in _checked(content, list))
            case "object":
                name, pairs = content
                made = _registered(name)(**dict(pairs))
            case "error":
                made = _error(*_checked(content, list))
            case "path":
                made = Path(_checked(content, str))
            case "text":
                made = bytes(self._take(content)).decode("utf-8", "surrogatepass")
            case "bytes":
                made = bytes(self._take(content))
            case "int":
                made = int(_checked(content, str), 16)
            case "float":
                (made,) = _DOUBLE.unpack(bytes.fromhex(_checked(content, str)))
            case "array":
                made = self._array(*content)
            case "scalar":
                made = self._array(*content)[()]
            case _:
                raise ValueError(f"the unknown tag {tag[:40]!r}")
        return made

    def _array(self, name: str, shape: list[int], size: int) -> Any:
        if not _DTYPE.fullmatch(_checked(name, str)):
            raise ValueError(f"the dtype {name[:40]!r}")
        dtype = np.dtype(name)
        if any(_checked(length, int) < 0 for length in _checked(shape, list)):
            raise ValueError(f"the shape {shape}")
        if size != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{size} bytes for {name} {shape}")
        data = self._take(size)
        array = np.ndarray(shape, dtype)  # its own memory: aligned, and writable
        array.reshape(-1).view(np.uint8)[...] = data
        return array

    def _take(self, size: Any) -> memoryview:
        if not 0 <= _checked(size, int) <= len(self._rest):
            raise ValueError(f"{size} bytes where {len(self._rest):,} are left")
        taken, self._rest = self._rest[:size], self._rest[size:]
        return taken


def _error(name: str, problem: str, remedy: str, everywhere: bool) -> HvdtrainError:
    cls = getattr(errors, _checked(name, str), None)
    if not (isinstance(cls, type) and issubclass(cls, HvdtrainError)):
        raise ValueError(f"the unknown error {name[:40]!r}")
    return cls(_checked(problem, str), _checked(remedy, str), everywhere=_checked(everywhere, bool))


def _registered(name: Any) -> type:
    if _checked(name, str) not in TYPES:
        raise ValueError(f"the unknown class {name[:40]!r}")
    return TYPES[name]


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"a {type(value).__name__} in place of a {kind.__name__}")
    return value


def _refuse(constant: str) -> None:
    raise ValueError(f"the number {constant}")
