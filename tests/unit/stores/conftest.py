"""What tests of run directories at URLs share: a store in memory, in which waits are short."""

import pytest

from hvdtrain.checkpoints.remote import claim

pytest.importorskip("fsspec")
from support.faulty_store import FaultyStore


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(claim, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(claim, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(claim, "FRESH_SECONDS", 5.0)
    made = FaultyStore()
    yield made
    made.heal()
