"""Serialization of data sets for reader processes: classes by value, large arrays by reference."""

import io
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np

from hvdtrain.data.memory_map import file_location, map_location
from hvdtrain.data.shared_memory import copy_to_shared_memory, map_shared_memory
from hvdtrain.errors import TaskError
from hvdtrain.task import FILE_MODULE_PREFIX

_SHARED_BYTES = 1 << 16  # a smaller array is pickled with the rest


class Payload:
    """Serialized data sets that other processes can load. A context manager that frees its memory.

    Arrays in memory-mapped files are mapped again by the process that loads the payload. Other large
    arrays are copied to shared memory once, for all processes.

    Args:
        datasets: data sets by name.

    Raises:
        TaskError: If one of them cannot be serialized.

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
    """Return the data sets of a payload, by name, in another process.

    Args:
        number: the payload's first file descriptor.

    Raises:
        Exception: Whatever a data set raises when it is unpickled.
    """
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
