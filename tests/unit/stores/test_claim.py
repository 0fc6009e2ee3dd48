"""Who has a run directory at a URL: one job at a time, and who takes over from a dead one."""

import itertools
import json
import socket
import time

import pytest

from hvdtrain.checkpoints.remote import claim
from hvdtrain.checkpoints.remote.claim import CLAIM_FILE, Claim
from hvdtrain.errors import EnvironmentFault
from hvdtrain.storage.urls import StoreError


def put(store, host="h9", **fields):
    other = {"id": "another", "host": host, "process": 77, "since": "2026-01-01", "writer": "", **fields}
    store.put(CLAIM_FILE, json.dumps(other).encode())


def claimed(store):
    return json.loads(store.objects()[CLAIM_FILE])


def test_a_free_run_directory_is_claimed_and_released(store):
    own = Claim(store.url)
    own.acquire()
    assert claimed(store)["id"] == own.id
    own.writer = own.id
    own.update()
    own.release()
    assert claimed(store)["is_released"]
    Claim(store.url).acquire()


def test_a_job_that_lives_is_named_to_the_second_one(store, monkeypatch):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 600.0)
    put(store)
    beats, sleep = itertools.count(1), time.sleep
    monkeypatch.setattr(claim.time, "sleep", lambda seconds: put(store, beat=next(beats)) or sleep(seconds))
    with pytest.raises(EnvironmentFault, match="in use by another job: process 77 on h9"):
        Claim(store.url).acquire()
    assert claimed(store)["id"] == "another"


@pytest.mark.parametrize(("host", "waits"), [("h9", 1), (socket.gethostname(), 0)])
def test_a_job_that_gives_no_sign_of_life_is_succeeded_at_once_if_it_ended_on_this_host(
    store, monkeypatch, host, waits
):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 0.1)
    put(store, host=host)
    own = Claim(store.url, (notes := []).append)
    own.acquire(ended="another")
    assert claimed(store)["id"] == own.id
    assert len(notes) == waits


def test_of_two_that_claim_at_once_the_last_has_it(store, monkeypatch):
    monkeypatch.setattr(claim.time, "sleep", lambda seconds: put(store))
    with pytest.raises(EnvironmentFault, match="in use by another job: process 77 on h9"):
        Claim(store.url).acquire()
    assert claimed(store)["id"] == "another"


def test_a_claim_that_was_taken_over_is_lost(store):
    own = Claim(store.url)
    own.acquire()
    put(store)
    for call in (own.update, own.check, own.release):
        with pytest.raises(StoreError, match="taken over"):
            call()
    assert "taken over by another job: process 77 on h9" in own.lost
    assert claimed(store)["id"] == "another"
