"""Who has a run directory at a URL: one job at a time, and who takes over from a dead one."""

import itertools
import json
import socket
import threading
import time
from dataclasses import asdict

import pytest
from support.store_jobs import Job

from hvdtrain.checkpoints.remote import claim
from hvdtrain.checkpoints.remote.claim import CLAIM_FILE, Claim, Holder
from hvdtrain.errors import EnvironmentFault
from hvdtrain.storage.urls import StoreError, StorePermissionError


def other(host="h9", **fields):
    return Holder("another", host, 77, time.time(), **fields)


def put(store, holder):
    store.put(CLAIM_FILE, json.dumps(asdict(holder)).encode())


def claimed(store):
    return Holder.parse(store.objects()[CLAIM_FILE])


def test_a_free_run_directory_is_claimed_and_released(store):
    own = Claim(store.url)
    own.acquire()
    assert claimed(store) == own.holder
    own.update(writer=own.holder.id)
    own.release()
    assert claimed(store).is_released
    Claim(store.url).acquire()


def test_a_job_that_lives_is_named_to_the_second_one(store, monkeypatch):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 600.0)
    put(store, other())
    is_over, beats = threading.Event(), itertools.count(1)

    def beat():
        while not is_over.wait(0.02):
            put(store, other(beat=next(beats)))

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        with pytest.raises(EnvironmentFault, match="in use by another job: process 77 on h9"):
            Claim(store.url).acquire()
    finally:
        is_over.set()
        thread.join()
    assert claimed(store).id == "another"


def test_a_job_that_gives_no_sign_of_life_is_succeeded_after_some_time(store, monkeypatch):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 0.3)
    put(store, other())
    notes = []
    own = Claim(store.url, notes.append)
    own.acquire()
    assert claimed(store).id == own.holder.id
    assert "waiting" in notes[0]
    assert not [name for name in store.objects() if name != CLAIM_FILE]  # the clock's probe


def test_the_job_before_on_this_host_is_succeeded_at_once(store, tmp_path, monkeypatch):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 600.0)
    job = Job(store, tmp_path / "copy")
    job.uploader.copy.unlock()  # as its end does, though it was killed
    Job(store, tmp_path / "copy", "auto")


@pytest.mark.parametrize(("host", "waits"), [("h9", 1), (socket.gethostname(), 0)])
def test_a_job_of_another_host_is_not_taken_for_dead(store, monkeypatch, host, waits):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 0.1)
    put(store, other(host=host))
    Claim(store.url, (notes := []).append, ended="another").acquire()
    assert len(notes) == waits


def test_a_job_that_uploads_what_is_left_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 600.0)
    put(store, other(is_ending=True))

    def end():
        for number in range(3):
            time.sleep(0.05)
            put(store, other(is_ending=True, beat=number))
        put(store, other(is_released=True))

    thread = threading.Thread(target=end)
    thread.start()
    Claim(store.url).acquire()
    thread.join()


def test_of_two_that_claim_at_once_the_last_has_it(store, monkeypatch):
    def claim_too(seconds):
        put(store, other())

    monkeypatch.setattr(claim.time, "sleep", claim_too)
    with pytest.raises(EnvironmentFault, match="in use by another job: process 77 on h9"):
        Claim(store.url).acquire()
    assert claimed(store).id == "another"


def test_a_claim_that_was_taken_over_is_lost(store):
    own = Claim(store.url)
    own.acquire()
    put(store, other())
    own.update()
    assert "taken over by another job: process 77 on h9" in own.lost
    with pytest.raises(StoreError, match="taken over"):
        own.check()
    own.release()
    assert claimed(store).id == "another"


def test_a_claim_that_was_removed_is_made_again(store):
    own = Claim(store.url)
    own.acquire()
    store.remove(CLAIM_FILE)
    own.update()
    assert claimed(store).id == own.holder.id
    assert not own.lost


def test_no_permission_to_write_is_found_at_the_start(store):
    store.fail(lambda method, path: method == "pipe_file", PermissionError("Access Denied"))
    with pytest.raises(StorePermissionError, match=r"hvdtrain.claim cannot be written: Access Denied"):
        Claim(store.url).acquire()
