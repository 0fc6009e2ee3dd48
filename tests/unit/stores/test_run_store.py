"""The process beside rank 0: what a job tells it and hears of it, and what it does when the job is gone."""

import os
import signal
import subprocess
import threading
import time
from contextlib import suppress

import pytest
from support.states import make_record, saved

from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.stores import messages as process_messages
from hvdtrain.stores import process
from hvdtrain.stores.begin import Begun
from hvdtrain.stores.run_store import RunStore


def long():
    """Return how long to wait for what comes."""
    return 120.0, 240.0


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store/a run"


@pytest.fixture
def opened(tmp_path, url):
    """Return what opens the run directory from a host; its processes are ended after the test."""
    stores = []

    def open_store(host="h1", resume=""):
        store = RunStore(url, tmp_path / host, ["--keep-last", "2"])
        stores.append(store)
        store.begin(resume)
        return store

    yield open_store
    for store in stores:
        store.close(0.0)


@pytest.fixture
def small_disk(tmp_path):
    """Return a folder on a disk of 256 KB of its own."""
    folder = tmp_path / "disk"
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=256k", "small-disk", folder]
    if subprocess.run(words, check=False, capture_output=True).returncode:
        pytest.skip("cannot make a small disk")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def save(store, step):
    config = make_record().config | {"run_dir": store.url}
    (store.folder / "metrics.jsonl").write_text("{}\n")
    return saved(store.folder / "checkpoints", step, config=config)


def wait_for(what, seconds=120.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until, "it did not come"
        time.sleep(0.05)


def test_what_a_job_writes_is_whole_when_it_was_waited_for(opened, tmp_path):
    store = opened()
    store.start(None)
    save(store, 3)
    assert store.flush(long)
    assert store.newest() == f"{store.url}/checkpoints/step-00000003"
    assert store.close(60.0)
    with pytest.raises(ConfigError, match="already holds a run"):
        opened("h2")
    assert opened("h3", "auto").begun.newest == "step-00000003"


def test_what_is_left_is_uploaded_though_the_job_was_killed(opened, tmp_path):
    store = opened()
    store.start(None)
    save(store, 3)
    assert store._process is not None
    child = store._process
    child.stdin.close()  # as it ends with the job
    wait_for(lambda: child.poll() is not None)
    child.stdout.close()
    store._process = None
    assert opened("h2", "auto").begun.newest == "step-00000003"


def test_a_process_that_was_killed_is_said_and_succeeded_at_once(opened, tmp_path):
    store = opened()
    store.start(None)
    save(store, 3)
    assert store.flush(long)
    assert store._process is not None
    os.killpg(store._process.pid, signal.SIGKILL)
    notes = []
    wait_for(lambda: notes.extend(store.notes()) or notes)
    assert "the process that uploads ended with -9" in notes[0]
    assert "nothing more is uploaded" in notes[0]
    store._ended_seconds -= 300.0
    store.refresh()
    assert store.state.failing_seconds >= 300.0
    assert not store.flush(long)
    assert "not all of the run is in" in store.problem()
    store.close(0.0)
    assert opened("h2", "auto").begun.newest == "step-00000003"


@pytest.mark.parametrize(("fault", "seconds"), [("refused", 5.0), ("full", 12.0)])
def test_what_cannot_be_uploaded_is_not_awaited_though_the_claim_is_still_written(
    fault, seconds, opened, tmp_path, small_disk
):
    store = opened(small_disk if fault == "full" else "h1")
    store.start(None)
    save(store, 3)
    if fault == "full":
        with suppress(OSError), open(small_disk / "filler", "wb", 0) as file:
            while True:
                file.write(bytes(1 << 12))
    else:
        (tmp_path / "store/a run/checkpoints").write_text("no folder")
    began = time.monotonic()
    assert not store.flush(lambda: (seconds, 120.0))  # a sign of life comes every 10 s
    assert time.monotonic() - began < 60.0
    assert (f"{small_disk}: No space left" if fault == "full" else "checkpoints") in store.problem()


def test_a_wait_for_the_store_can_be_shortened(opened, tmp_path):
    store = opened()
    store.start(None)
    (tmp_path / "store/a run/checkpoints").write_text("no folder")
    save(store, 3)
    began = time.monotonic()
    assert not store.flush(lambda: (240.0, 1.0 if time.monotonic() > began + 1.0 else 240.0))
    assert time.monotonic() - began < 60.0


def test_a_store_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "store").write_text("a file")
    store = RunStore(f"file://{tmp_path}/store/run", tmp_path / "copy")
    with pytest.raises(EnvironmentFault, match="store/run"):
        store.begin("")
    assert not store.is_open


class ClientError(Exception):
    """An error of a store's client, which is no OSError."""


def service_over(monkeypatch, tmp_path, begin):
    """Return a service whose uploader begins so, what its job writes to, and what it reads."""
    (there, job), (heard, outbox) = os.pipe(), os.pipe()
    monkeypatch.setattr(process.Uploader, "begin", begin)
    service = process.UploadService(
        "faulty://bucket/run", tmp_path, process.Retention(), process.Outbox(outbox), there
    )
    return service, job, heard


def test_an_error_of_a_client_is_told(store, monkeypatch, tmp_path):
    def fail(uploader, resume):
        raise ClientError("no default credentials")

    service, job, heard = service_over(monkeypatch, tmp_path, fail)
    assert service.run("") == 1
    os.close(job)
    assert b"ClientError: no default credentials" in os.read(heard, 65536)


def test_a_request_that_never_ends_does_not_keep_the_process(store, monkeypatch, tmp_path):
    exits, is_over = [], threading.Event()
    monkeypatch.setattr(process, "KILLED_SECONDS", 0.1)
    monkeypatch.setattr(process, "_RELEASE_SECONDS", 0.1)
    monkeypatch.setattr(process.os, "_exit", lambda code: (exits.append(code), is_over.set()))
    service, job, _ = service_over(monkeypatch, tmp_path, lambda uploader, resume: Begun())

    def hang(uploader, step):
        os.close(job)
        is_over.wait(60.0)

    monkeypatch.setattr(process.Uploader, "start", hang)
    os.write(job, process_messages.encode(process_messages.START, None))
    service.run("")
    assert exits
    assert is_over.is_set()
