"""The process beside rank 0: what a job tells it and hears of it, and what it does when the job is gone."""

import subprocess
import time
from contextlib import suppress

import pytest
from support.states import make_record, saved

from hvdtrain.checkpoints.remote.run_store import RunStore
from hvdtrain.errors import ConfigError, EnvironmentFault


@pytest.fixture
def url(tmp_path):
    return f"file://{tmp_path}/store/a run"


@pytest.fixture
def opened(tmp_path, url):
    """Return what opens the run directory from a host; its processes are ended after the test."""
    stores = []

    def open_store(host="h1", resume=""):
        store = RunStore(url, tmp_path / host, keep_last=2)
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
    assert store.flush(lambda: (120.0, 240.0))
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


def test_a_store_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "store").write_text("a file")
    store = RunStore(f"file://{tmp_path}/store/run", tmp_path / "copy")
    with pytest.raises(EnvironmentFault, match="store/run"):
        store.begin("")
    assert not store.is_open
