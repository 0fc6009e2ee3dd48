"""What tests of run directories at URLs share: a store in memory, in which waits are short."""

import pytest

from hvdtrain.checkpoints.remote import begin as working_copy
from hvdtrain.checkpoints.remote import claim
from hvdtrain.storage.urls import Patience

pytest.importorskip("fsspec")
from support.faulty_store import FaultyStore


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(claim, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(claim, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(claim, "_READ_SECONDS", 0.01)
    monkeypatch.setattr(claim, "_PATIENCE", Patience(stall_seconds=5, tries=1))
    monkeypatch.setattr(claim, "FRESH_SECONDS", 5.0)
    monkeypatch.setattr(working_copy, "_LOCK_SECONDS", 5.0)
    made = FaultyStore()
    yield made
    made.heal()
