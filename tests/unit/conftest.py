"""What unit tests share: hypothesis without clocks, random starts and files; reports to read."""

import os
import signal
import sys
import threading
import zlib
from types import SimpleNamespace

import pytest
from hypothesis import settings
from support import numpy_backend
from support.watching import Watched

from hvdtrain.checkpoints import saver
from hvdtrain.config import Layer
from hvdtrain.host.processes import HANDLED
from hvdtrain.jobs.train import run_job
from hvdtrain.reporting import console, event_file, report

settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")


MOST_PROCESSES = 8  # a process that has loaded both frameworks takes about 1.5 GB


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of test processes for `-n auto`: the cores that this process may use."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


@pytest.fixture(autouse=True)
def _numbers_of_its_own(request):
    """Let a test draw the same random numbers whichever tests its process has run before."""
    if (twins := sys.modules.get("support.twins")) is not None:
        twins.RANDOM.seed(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(autouse=True)
def _signals_are_handled_as_before():
    """Restore what signals do: a worker that ends ignores them, and what the tests start would, too."""
    before = {number: signal.getsignal(number) for number in HANDLED}
    yield
    if threading.current_thread() is threading.main_thread():
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _waits_are_not_noted(monkeypatch):
    """Has a save take its time on a busy machine without a note about the wait."""
    monkeypatch.setattr(saver, "_REPORTED_WAIT_SECONDS", 600)


@pytest.fixture
def clock(monkeypatch):
    """The seconds that a report reads, moved by hand."""
    now = SimpleNamespace(seconds=100.0)
    fake = SimpleNamespace(perf_counter=lambda: now.seconds, time=lambda: 1_700_000_000.0)
    for module in (console, event_file, report):
        monkeypatch.setattr(module, "time", fake)
    return now


@pytest.fixture
def plain(tmp_path, clock):
    watched = Watched(tmp_path, terminal=False)
    yield watched
    watched.report.close()


@pytest.fixture
def live(tmp_path, clock):
    watched = Watched(tmp_path, terminal=True)
    yield watched
    watched.report.close()


@pytest.fixture
def train(tmp_path, monkeypatch):
    """Trains digits in a whole job of one worker, with the numpy backend, in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("hvdtrain.host.environment.prepare", dict)
    numpy_backend.install(monkeypatch)

    def start(task_class=numpy_backend.NumpyDigits, callbacks=(), **fields):
        given = {"framework": "numpy", "task": "digits", "run_dir": "run", "learning_rate": 0.1, **fields}
        return run_job([Layer("options", given)], task_class, callbacks)

    return start
