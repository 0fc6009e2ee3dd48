"""What unit tests share: hypothesis without clocks, random starts and files; reports to read."""

import os
from types import SimpleNamespace

import pytest
from hypothesis import settings
from support.watching import Watched

from hvdtrain.reporting import console, event_file, report

settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")


MOST_PROCESSES = 8  # a process that has loaded both frameworks takes about 1.5 GB


def pytest_xdist_auto_num_workers() -> int:
    """Return the number of test processes for `-n auto`: the cores that this process may use."""
    return min(len(os.sched_getaffinity(0)), MOST_PROCESSES)


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
