"""Reader processes: what they give is what the worker would read itself, and they end with it."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from hvdtrain.data.datasets import ArrayDataset
from hvdtrain.data.readers import Readers
from hvdtrain.errors import TaskError

SIZE = 40


def numbers(size: int = SIZE) -> dict:
    return {"inputs": np.arange(size * 3, dtype=np.float32).reshape(size, 3), "targets": np.arange(size)}


def shared_memory() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("psm_", "hvdtrain"))}


def test_readers_do_not_end_of_signals_and_leave_nothing_behind():
    before, files = shared_memory(), set(os.listdir("/proc/self/fd"))
    big = np.arange(1 << 18, dtype=np.float32).reshape(1024, 256)
    with Readers({"data": ArrayDataset({"inputs": big})}, 2) as readers:
        fetch, pids = readers.fetch_from("data"), readers.pids
        for _ in pids:
            fetch(np.asarray([0]), None)
        for pid in pids:  # which are meant for the worker
            os.kill(pid, signal.SIGTERM)
            os.kill(pid, signal.SIGINT)
        for _ in pids:
            found, _ = fetch(np.asarray([5, 1000]), None)
        assert shared_memory() - before == set()
    np.testing.assert_array_equal(found["inputs"], big[[5, 1000]])
    assert [pid for pid in pids if psutil.pid_exists(pid)] == []
    assert set(os.listdir("/proc/self/fd")) <= files


def test_arrays_in_a_file_are_opened_and_others_lie_once_for_all_readers(tmp_path):
    np.save(tmp_path / "inputs.npy", np.arange(SIZE * 4096, dtype=np.float64).reshape(SIZE, 4096))
    mapped = np.load(tmp_path / "inputs.npy", mmap_mode="r")
    data = ArrayDataset(
        {"inputs": mapped[4:, ::2], "targets": np.arange((SIZE - 4) * 8192).reshape(-1, 8192)}
    )
    with Readers({"data": data}, 2) as readers:
        found, _ = readers.fetch_from("data")(np.asarray([0, 7]), None)
        maps = [Path(f"/proc/{pid}/maps").read_text() for pid in readers.pids]
        time_limit = time.monotonic() + 60
        while any(text.count("memfd:hvdtrain") < 1 for text in maps) and time.monotonic() < time_limit:
            maps = [Path(f"/proc/{pid}/maps").read_text() for pid in readers.pids]
    np.testing.assert_array_equal(found["inputs"], mapped[[4, 11], ::2].astype(np.float32))
    assert all("inputs.npy" in text and "memfd:hvdtrain" in text for text in maps)


def test_what_cannot_be_serialized_is_named():
    data = ArrayDataset(numbers())
    data.lock = threading.Lock()
    with pytest.raises(
        TaskError, match="the training data cannot be serialized for reader processes: TypeError"
    ):
        Readers({"training data": data}, 1)
