"""Serialization of data sets for reader processes: classes by value, large arrays by reference."""

import errno
import io
import mmap
import os
import pickle
import sys
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError, TaskError
from hvdtrain.task import FILE_MODULE_PREFIX


def mapped(path: Path, offset: int = 0, shape: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """Return bytes of a file as an array, which all workers of a host share and which is read-only."""
    try:
        return np.memmap(path, np.uint8, "r", offset, shape).view(np.ndarray)
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter
        is_full = getattr(error, "errno", 0) == errno.ENOMEM
        remedy = "Are there more than 60,000 files? Join them." if is_full else ""
        raise DataError(f"cannot map {path} into memory: {error}", remedy) from None


def memmap_base(array: NDArray[Any]) -> np.memmap[Any, Any] | None:
    """Return the memory-mapped file that an array is a view of, or None if it is in ordinary memory."""
    base: Any = array
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    return base if isinstance(base, np.memmap) and isinstance(base.base, mmap.mmap) else None


def file_location(array: NDArray[Any]) -> tuple[str, int] | None:
    """Return the file that holds an array and its offset there in bytes, or None if it must be copied."""
    base = memmap_base(array)
    if base is None or base.filename is None or base.mode == "c":  # copied on write: it may differ
        return None
    distance = array.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    return str(Path(os.fsdecode(base.filename)).resolve()), base.offset + distance


def map_location(
    path: str, offset: int, dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]
) -> NDArray[Any]:
    """Return an array that a file holds, mapped read-only."""
    with open(path, "rb") as file:
        mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return np.ndarray(shape, dtype, mapping, offset, strides)


def send(connection: Connection, value: Any) -> None:
    """Send an object; the contents of its arrays are not copied first."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [buffer.raw() for buffer in buffers]
    connection.send((head, [part.nbytes for part in parts]))
    for part in parts:
        done = 0
        while done < part.nbytes:
            done += os.write(connection.fileno(), part[done:])


def receive(connection: Connection) -> Any:
    """Return the next object, waiting for it if necessary."""
    head, sizes = connection.recv()
    return pickle.loads(head, buffers=[_receive_bytes(connection, size) for size in sizes])


def _receive_bytes(connection: Connection, size: int) -> memoryview:
    """Return what comes next; ``Connection.recv_bytes`` would allocate it more than once."""
    view = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
    done = 0
    while done < size:
        count = os.readv(connection.fileno(), [view[done:]])
        if count == 0:
            raise EOFError("the other side has closed the connection")
        done += count
    return view


_ALIGNED = 64  # bytes; frameworks read arrays faster from such addresses


class Payload:
    """Serialized data sets that other processes can load. A context manager that frees its memory."""

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        buffers: list[pickle.PickleBuffer] = []
        heads = [_pickled(*item, buffers) for item in datasets.items()]
        parts = [buffer.raw() for buffer in buffers]
        head = pickle.dumps((sys.path, heads, [part.nbytes for part in parts]))
        self.descriptor = os.memfd_create("hvdtrain", os.MFD_CLOEXEC)
        try:
            size = len(head) + sum(part.nbytes + _ALIGNED for part in parts)
            os.posix_fallocate(self.descriptor, 0, size)  # without it, a lack of memory is a SIGBUS
            with open(self.descriptor, "wb", closefd=False) as file:
                file.write(head)
                for part in parts:
                    file.seek(_aligned(file.tell()))
                    file.write(part)
        except BaseException:
            os.close(self.descriptor)
            raise

    def __enter__(self) -> "Payload":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.descriptor)  # processes that inherited the memory keep it


def load_payload(number: int) -> dict[str, Any]:
    """Return the data sets of a payload in another process, which may change arrays for itself."""
    content = mmap.mmap(number, os.fstat(number).st_size, access=mmap.ACCESS_COPY)
    sys.path[:], heads, sizes = pickle.load(content)  # it reads no further than its own end
    at, buffers = content.tell(), []
    for size in sizes:
        at = _aligned(at)
        buffers.append(memoryview(content)[at : at + size])
        at += size
    left = iter(buffers)
    return dict(pickle.loads(head, buffers=left) for head in heads)


def _aligned(place: int) -> int:
    return -(-place // _ALIGNED) * _ALIGNED


def _pickled(name: str, dataset: Any, buffers: list[pickle.PickleBuffer]) -> bytes:
    """Return a data set as bytes, and add the contents of its arrays to ``buffers``."""
    file = io.BytesIO()
    # classes of a task's file cannot be imported under the name of its module
    own = [module for key, module in list(sys.modules.items()) if key.startswith(FILE_MODULE_PREFIX)]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        _Pickler(file, protocol=5, buffer_callback=buffers.append).dump((name, dataset))
    except Exception as error:
        raise TaskError(
            f"the {name} cannot be serialized for reader processes: {type(error).__name__}: {error}",
            "Open files, connections and the like when a sample is read, or use --read-workers 0.",
        ) from error
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


class _Pickler(cloudpickle.Pickler):
    """Pickles arrays in files by their place there."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            location = file_location(value)
            if location is not None:
                return map_location, (*location, value.dtype, value.shape, value.strides)
        return super().reducer_override(value)
