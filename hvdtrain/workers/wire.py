"""Objects that workers send one another: JSON of known types, so that nothing that arrives is executed.

A message is a JSON text and the bytes of strings and arrays after it. JSON has no tuples, sets and the like:
each is an object with one key, its tag. A class travels by its name, and is found only among the classes that
are marked by ``wire_types.travels`` and the errors of hvdtrain; nothing is imported or unpickled. A value
arrives as it was: a tuple stays a tuple, and every bit of a float stays.
"""

import dataclasses
import json
import math
import re
import struct
from collections.abc import Callable, Iterable, Mapping
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
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

_KEY = object()  # the place of a key of a dict


def encode(value: Any) -> bytes:
    """Return a value as a message.

    Raises:
        ExchangeError: If it holds something of a type that does not travel; with its place and type.
    """
    writer = _Writer()
    text = json.dumps(writer.write(value), allow_nan=False, separators=(",", ":")).encode("ascii")
    if len(text) > MAX_TEXT_BYTES:
        raise ExchangeError(f"an object for other workers takes {len(text):,} bytes, of {MAX_TEXT_BYTES:,}")
    return b"".join((_HEAD.pack(_MAGIC, len(text)), text, *writer.buffers))


def decode(message: bytes | memoryview, sender: str = "another worker") -> Any:
    """Return the value of a message.

    Raises:
        ExchangeError: If the message is none that :func:`encode` makes.
    """
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
        self._path: list[Any] = []  # keys and places down to the value

    def write(self, value: Any) -> Any:
        kind = type(value)
        if (method := _METHODS.get(kind)) is not None:
            return method(self, value)
        if isinstance(value, HvdtrainError):
            name = next(cls.__name__ for cls in kind.__mro__ if cls.__module__ == errors.__name__)
            return {"error": [name, *map(self.write, (value.problem, value.remedy)), value.everywhere]}
        if isinstance(value, IntEnum):  # arrives as a plain number
            return self.integer(int(value))
        if isinstance(value, np.generic):
            return {"scalar": self._numbers(value)}
        if TYPES.get(kind.__name__) is kind:
            return {"object": [kind.__name__, self._pairs((n, getattr(value, n)) for n in _fields(kind))]}
        raise self._error(f"is a {kind.__module__}.{kind.__qualname__}")

    def plain(self, value: Any) -> Any:
        return value

    def integer(self, value: int) -> Any:
        return value if abs(value) < _JSON_INT else {"int": f"{value:x}"}

    def float(self, value: Any) -> Any:
        return value if math.isfinite(value) else {"float": _DOUBLE.pack(value).hex()}

    def text(self, value: str) -> Any:
        if value.isascii() or value.isprintable():
            return value
        # JSON joins two halves of a character, which Python keeps apart
        return {"text": self._put(value.encode("utf-8", "surrogatepass"))}

    def bytes(self, value: Any) -> Any:
        return {"bytes": self._put(value)}

    def path(self, value: Path) -> Any:
        return {"path": self.text(str(value))}

    def array(self, value: NDArray[Any]) -> Any:
        return {"array": self._numbers(value)}

    def list(self, values: Any) -> Any:
        return [self._at(place, value) for place, value in enumerate(values)]

    def items(self, values: Any) -> Any:
        return {_CONTAINERS[type(values)]: self.list(values)}

    def dict(self, values: Mapping[Any, Any]) -> Any:
        return {"dict": self._pairs(values.items())}

    def _pairs(self, pairs: Iterable[tuple[Any, Any]]) -> Any:
        return [[self._at(_KEY, key), self._at(key, value)] for key, value in pairs]

    def _at(self, place: Any, value: Any) -> Any:
        self._path.append(place)
        if len(self._path) > MAX_DEPTH:
            raise self._error(f"lies deeper than {MAX_DEPTH} levels")
        written = self.write(value)
        self._path.pop()
        return written

    def _numbers(self, value: Any) -> Any:
        name = value.dtype.name if value.dtype.kind == "V" else value.dtype.str
        if not _DTYPE.fullmatch(name):
            raise self._error(f"has the dtype {value.dtype}")
        return [name, list(value.shape), self._put(value.tobytes())]

    def _put(self, data: Any) -> int:
        self.buffers.append(data)
        return len(data)

    def _error(self, found: str) -> ExchangeError:
        place = " of ".join(map(_describe, reversed(self._path[-6:]))) or "an object"
        return ExchangeError(
            f"what this worker sends to the others cannot travel: {place} {found}",
            "Numbers, texts, bytes, arrays of numbers, lists, tuples, sets and dicts of them can.",
        )


class _Reader:
    """Turns a message into its value; everything in it is checked."""

    def __init__(self, message: memoryview) -> None:
        if len(message) < _HEAD.size:
            raise ValueError(f"a message of {len(message)} bytes")
        magic, size = _HEAD.unpack_from(message)
        if magic != _MAGIC:
            raise ValueError(f"a message that starts with {bytes(message[:8])!r}")
        if size > min(MAX_TEXT_BYTES, len(message) - _HEAD.size):
            raise ValueError(f"a text of {size:,} bytes in a message of {len(message):,}")
        self._text = bytes(message[_HEAD.size : _HEAD.size + size])
        self._rest = message[_HEAD.size + size :]

    def value(self) -> Any:
        value = self._read(json.loads(self._text.decode("ascii"), parse_constant=_refuse), 0)
        if len(self._rest):
            raise ValueError(f"{len(self._rest):,} bytes too many")
        return value

    def _read(self, written: Any, depth: int) -> Any:
        if not isinstance(written, list | dict):
            return written
        if depth > MAX_DEPTH + 1:  # a text in a path, or in an error
            raise ValueError("too many levels")
        if isinstance(written, list):
            return self._read_list(written, depth)
        ((tag, content),) = written.items()
        if tag in _MADE_OF_ITEMS:
            return _MADE_OF_ITEMS[tag](self._read_list(content, depth))
        if tag in ("dict", "object"):
            name, pairs = ("", content) if tag == "dict" else content
            read = self._read_pairs(pairs, depth)
            return read if tag == "dict" else _registered(name)(**read)
        return self._read_leaf(tag, content, depth)

    def _read_list(self, items: Any, depth: int) -> list[Any]:
        return [self._read(item, depth + 1) for item in _checked(items, list)]

    def _read_pairs(self, pairs: Any, depth: int) -> dict[Any, Any]:
        read = {}
        for key, value in (_checked(pair, list) for pair in _checked(pairs, list)):
            made = self._read(key, depth + 1)
            read[made] = self._read(value, depth + 1)
        return read

    def _read_leaf(self, tag: str, content: Any, depth: int) -> Any:
        made: Any
        match tag:
            case "bytes":
                made = bytes(self._take(content))
            case "text":
                made = bytes(self._take(content)).decode("utf-8", "surrogatepass")
            case "int":
                made = int(_checked(content, str), 16)
            case "float":
                (made,) = _DOUBLE.unpack(bytes.fromhex(_checked(content, str)))
            case "array":
                made = self._read_array(*content)
            case "scalar":
                made = self._read_array(*content)[()]
            case "path":
                made = Path(_checked(self._read(content, depth + 1), str))
            case "error":
                made = self._read_error(*self._read_list(content, depth))
            case _:
                raise ValueError(f"the unknown tag {tag[:40]!r}")
        return made

    def _read_error(self, name: str, problem: str, remedy: str, everywhere: bool) -> HvdtrainError:
        cls = getattr(errors, _checked(name, str), None)
        if not (isinstance(cls, type) and issubclass(cls, HvdtrainError)):
            raise ValueError(f"the unknown error {name[:40]!r}")
        return cls(_checked(problem, str), _checked(remedy, str), everywhere=_checked(everywhere, bool))

    def _read_array(self, name: str, shape: list[int], size: int) -> Any:
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


_METHODS: dict[type, Callable[[_Writer, Any], Any]] = {
    type(None): _Writer.plain,
    bool: _Writer.plain,
    int: _Writer.integer,
    float: _Writer.float,
    str: _Writer.text,
    bytes: _Writer.bytes,
    type(Path()): _Writer.path,
    list: _Writer.list,
    tuple: _Writer.items,
    set: _Writer.items,
    frozenset: _Writer.items,
    dict: _Writer.dict,
    np.ndarray: _Writer.array,
    np.memmap: _Writer.array,
}
_CONTAINERS: dict[type, str] = {tuple: "tuple", set: "set", frozenset: "frozenset"}
_MADE_OF_ITEMS: dict[str, Callable[..., Any]] = {tag: kind for kind, tag in _CONTAINERS.items()}


def _describe(place: Any) -> str:
    if place is _KEY:
        return "a key"
    return f"item {place}" if type(place) is int else f"{place[:40]!r}" if type(place) is str else "a value"


def _fields(cls: Any) -> list[str]:
    if issubclass(cls, BaseModel):
        return list(cls.model_fields)
    return [field.name for field in dataclasses.fields(cls)]


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
