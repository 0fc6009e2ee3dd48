"""Handing data sets to reader processes: classes by value, arrays by where they lie."""

import io
import os
import pickle
import sys
from collections.abc import Mapping
from typing import Any

import cloudpickle
import numpy as np

from hvdtrain.data.mapped import open_in_file, open_shared, place_in_file, share
from hvdtrain.errors import TaskError
from hvdtrain.task import FILE_MODULE_PREFIX

_SHARED_BYTES = 1 << 16  # a smaller array travels with the rest


class Parcel:
    """Data sets as another process can open them. A context manager: what it holds is then freed.

    Arrays in files are opened there; other large ones lie once in memory, for all processes that
    open the parcel.

    Args:
        datasets: data sets by name.

    Raises:
        TaskError: where one of them cannot be handed over.

    Attributes:
        descriptors: the file descriptors that a process must inherit to open it; the first holds
            the data sets themselves.
    """

    def __init__(self, datasets: Mapping[str, Any]) -> None:
        self.descriptors: list[int] = []
        parts = [pickle.dumps(sys.path)]
        try:
            for name, dataset in datasets.items():
                parts.append(self._pickled(name, dataset))
            whole = np.frombuffer(b"".join(parts), np.uint8)
            self.descriptors.insert(0, share(whole))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "Parcel":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Free what the parcel holds; processes that inherited it keep it."""
        while self.descriptors:
            os.close(self.descriptors.pop())

    def _pickled(self, name: str, dataset: Any) -> bytes:
        file = io.BytesIO()
        # classes of a task's file are not importable under its module's name
        own = [module for key, module in list(sys.modules.items()) if key.startswith(FILE_MODULE_PREFIX)]
        for module in own:
            cloudpickle.register_pickle_by_value(module)
        try:
            _Pickler(file, self.descriptors).dump((name, dataset))
        except Exception as error:
            raise TaskError(
                f"the {name} cannot be handed to reader processes: {type(error).__name__}: {error}",
                "Open files, connections and the like when a sample is read, or use --read-workers 0.",
            ) from error
        finally:
            for module in own:
                cloudpickle.unregister_pickle_by_value(module)
        return file.getvalue()


def unpack(number: int) -> dict[str, Any]:
    """Open a parcel in another process, by its first descriptor.

    Raises:
        Exception: whatever a data set raises when it is made again.
    """
    # opened anew: the processes share one place in what they inherited
    with open(f"/proc/self/fd/{number}", "rb") as file:
        sys.path[:] = pickle.load(file)
        datasets = {}
        while file.peek(1):
            name, dataset = pickle.load(file)
            datasets[name] = dataset
    return datasets


class _Pickler(cloudpickle.Pickler):
    def __init__(self, file: io.BytesIO, descriptors: list[int]) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self._descriptors = descriptors

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            found = place_in_file(value)
            if found is not None:
                return open_in_file, (*found, value.dtype, value.shape, value.strides)
            if type(value) in (np.ndarray, np.memmap) and value.nbytes >= _SHARED_BYTES:
                self._descriptors.append(share(value))
                return open_shared, (self._descriptors[-1], value.dtype, value.shape)
        return super().reducer_override(value)
