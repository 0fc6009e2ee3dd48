"""Serialization of data sets for reader processes: classes by value, large arrays by reference."""

import errno
import io
import mmap
import os
import pickle
import socket
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
from numpy.typing import NDArray

from hvdtrain.errors import DataError, TaskError
from hvdtrain.task import FILE_MODULE_PREFIX


def copy_to_shared_memory(array: NDArray[Any]) -> int:
    """Copy an array to memory that other processes can map.

    Returns:
        A file descriptor, which those processes must inherit.
    """
    number = os.memfd_create("hvdtrain", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(number, 0, array.nbytes)  # without it, a lack of memory is a SIGBUS
        with mmap.mmap(number, array.nbytes) as mapping:
            np.copyto(np.ndarray(array.shape, array.dtype, mapping), array)
    except BaseException:
        os.close(number)
        raise
    return number


def map_shared_memory(number: int, dtype: np.dtype[Any], shape: tuple[int, ...]) -> NDArray[Any]:
    """Return an array that ``copy_to_shared_memory`` copied.

    It can be written to, but other processes do not see the changes.
    """
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    return np.ndarray(shape, dtype, mmap.mmap(number, size, access=mmap.ACCESS_COPY))


def mapped(path: Path, offset: int = 0, shape: tuple[int, ...] | None = None) -> NDArray[np.uint8]:
    """Return bytes of a file as an array, which all workers of a host share and which is read-only."""
    try:
        return np.memmap(path, np.uint8, "r", offset, shape).view(np.ndarray)
    except (OSError, ValueError) as error:  # ValueError: the file has become shorter
        remedy = (
            "Are there more than 60,000 files? Join them."
            if getattr(error, "errno", 0) == errno.ENOMEM
            else ""
        )
        raise DataError(f"cannot map {path} into memory: {error}", remedy) from None


def memmap_base(array: NDArray[Any]) -> np.memmap[Any, Any] | None:
    """Return the memory-mapped file that an array is a view of, or None if it is in ordinary memory."""
    base: Any = array
    while isinstance(base, np.ndarray) and isinstance(base.base, np.ndarray):
        base = base.base
    return base if isinstance(base, np.memmap) and isinstance(base.base, mmap.mmap) else None


def file_location(array: NDArray[Any]) -> tuple[str, int] | None:
    """Return the file that holds an array and its offset there in bytes, or None if it must be copied.

    An array that was mapped copy-on-write must be copied: it may differ from its file.
    """
    base = memmap_base(array)
    if base is None or base.filename is None or base.mode == "c":
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


_NUMBER = struct.Struct("<Q")


def send(connection: socket.socket, value: Any) -> None:
    """Send an object."""
    buffers: list[pickle.PickleBuffer] = []
    head = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    parts = [buffer.raw() for buffer in buffers]
    sizes = [len(head), *(part.nbytes for part in parts)]
    connection.sendall(b"".join(_NUMBER.pack(number) for number in (len(sizes), *sizes)) + head)
    for part in parts:
        connection.sendall(part)


def receive(connection: socket.socket) -> Any:
    """Return the next object, waiting for it if necessary."""
    (count,) = _NUMBER.unpack(_receive_bytes(connection, _NUMBER.size))
    table = _receive_bytes(connection, count * _NUMBER.size)
    head, *sizes = [_NUMBER.unpack_from(table, k * _NUMBER.size)[0] for k in range(count)]
    pickled = _receive_bytes(connection, head)
    return pickle.loads(pickled, buffers=[_receive_bytes(connection, size) for size in sizes])


def _receive_bytes(connection: socket.socket, size: int) -> memoryview:
    view = np.empty(size, np.uint8).data  # a bytearray would be filled with zeros first
    done = 0
    while done < size:
        try:
            count = connection.recv_into(view[done:])
        except ConnectionError:
            count = 0
        if count == 0:
            raise EOFError("the other side has closed the connection")
        done += count
    return view


_SHARED_BYTES = 1 << 16  # a smaller array is pickled with the rest


class Payload:
    """Serialized data sets that other processes can load. A context manager that frees its memory.

    Arrays in memory-mapped files are mapped again by the process that loads the payload. Other large
    arrays are copied to shared memory once, for all processes.

    Attributes:
        descriptors: the file descriptors that a process must inherit to load the payload; the first
            one holds the pickled data sets.
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.descriptors: list[int] = []
        parts = [pickle.dumps(sys.path)]
        try:
            for name, dataset in datasets.items():
                parts.append(self._pickle(name, dataset))
            pickled = np.frombuffer(b"".join(parts), np.uint8)
            self.descriptors.insert(0, copy_to_shared_memory(pickled))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Payload":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free the payload's memory; processes that inherited it keep it."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _pickle(self, name: str, dataset: Any) -> bytes:
        file = io.BytesIO()
        # classes of a task's file cannot be imported under the name of its module
        own = [module for key, module in list(sys.modules.items()) if key.startswith(FILE_MODULE_PREFIX)]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            _Pickler(file, self.descriptors).dump((name, dataset))
        except Exception as error:
            raise TaskError(
                f"the {name} cannot be serialized for reader processes: {type(error).__name__}: {error}",
                "Open files, connections and the like when a sample is read, or use --read-workers 0.",
            ) from error
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)
        return file.getvalue()


def load_payload(number: int) -> dict[str, Any]:
    """Return the data sets of a payload, by name, in another process."""
    # opened anew: processes share the position in a file that they inherited
    with open(f"/proc/self/fd/{number}", "rb") as file:
        sys.path[:] = pickle.load(file)
        datasets = {}
        while file.peek(1):
            name, dataset = pickle.load(file)
            datasets[name] = dataset
    return datasets


class _Pickler(cloudpickle.Pickler):
    """Pickles arrays by reference: their location in a file, or a copy in shared memory."""

    def __init__(self, file: io.BytesIO, descriptors: list[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._descriptors = descriptors

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            location = file_location(value)
            if location is not None:
                return map_location, (*location, value.dtype, value.shape, value.strides)
            if type(value) in (np.ndarray, np.memmap) and value.nbytes >= _SHARED_BYTES:
                self._descriptors.append(copy_to_shared_memory(value))
                return map_shared_memory, (self._descriptors[-1], value.dtype, value.shape)
        return super().reducer_override(value)
