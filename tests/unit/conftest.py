"""What unit tests share: hypothesis without clocks, random starts and files; reports to read."""

from types import SimpleNamespace

import pytest
from hypothesis import settings
from watching import Watched

from hvdtrain import report as report_module

settings.register_profile("unit", deadline=None, derandomize=True, database=None, max_examples=60)
settings.load_profile("unit")


@pytest.fixture
def clock(monkeypatch):
    """The seconds that a report reads, moved by hand."""
    now = SimpleNamespace(seconds=100.0)
    fake = SimpleNamespace(perf_counter=lambda: now.seconds, time=lambda: 1_700_000_000.0)
    monkeypatch.setattr(report_module, "time", fake)
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
