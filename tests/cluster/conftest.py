"""What tests on several hosts share: nothing of a cluster may be left on the machine."""

import os
import socket
import tempfile
from pathlib import Path

import psutil
import pytest
from hosts import FOLDER_PREFIX
from image import image_root  # noqa: F401 - a fixture, built once for all modules


@pytest.fixture(autouse=True, scope="session")
def _nothing_left_of_any_cluster():
    """Fail the session that leaves a process, a mount, a folder or the name of a cluster behind."""
    name = socket.gethostname()
    yield
    assert socket.gethostname() == name, "a test renamed this machine: its host lacks a UTS namespace"
    processes = psutil.Process().children(recursive=True)
    holders = [process for process in processes if "namespace_holder" in " ".join(process.cmdline())]
    mounts = [line for line in Path("/proc/self/mounts").read_text().splitlines() if FOLDER_PREFIX in line]
    folders = list(Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"))
    assert not holders + mounts + folders, f"left of a cluster in process {os.getpid()}"


def pytest_collection_modifyitems(items):
    """Let tests that need the image come last, and give the first of them the time to wait for it."""
    for item in items:
        if _needs_image(item):
            item.add_marker(pytest.mark.timeout(2400))
    items.sort(key=_needs_image)


def _needs_image(item) -> bool:
    return "image_root" in getattr(item, "fixturenames", ())
