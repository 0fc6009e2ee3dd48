"""URLs of object stores: what is read and written there, with faults between; and checkpoints of runs."""

import os
import time
from pathlib import Path

import pytest
from pydantic import ValidationError
from support.object_store import client_environment, object_store
from support.states import equal, make_state, saved
from support.stored_runs import evaluation, make_run, window

import hvdtrain
from hvdtrain.checkpoints.remote import stored_checkpoints
from hvdtrain.config import Config
from hvdtrain.errors import CheckpointError, UsageError
from hvdtrain.jobs.serving.checkpoint import chosen_checkpoint
from hvdtrain.storage import urls as object_urls
from hvdtrain.storage.files import check_url, expand_path
from hvdtrain.storage.text import printable
from hvdtrain.storage.urls import ChangedObjectError, MissingObjectError, StoreError, download, upload

fsspec = pytest.importorskip("fsspec")
pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server():
    with object_store() as store, client_environment(store):
        object_urls.entries(store.url("nothing"))  # its thread is there before those of tests are counted
        yield store


@pytest.fixture
def store(server):
    yield server
    server.proxy.heal()


@pytest.fixture(params=["s3", "memory", "file"])
def url(request, store, tmp_path):
    """Return the URL of a folder with an unusual name, which is empty."""
    name = f"{request.node.name} ü/a b"
    return {"s3": store.url(), "memory": "memory:/", "file": f"file://{tmp_path}"}[request.param] + f"/{name}"


def file_of(path, size):
    path.write_bytes(content := os.urandom(size))
    return content


@pytest.mark.parametrize("size", [0, 17_000_003])
def test_a_file_goes_and_comes_back(url, tmp_path, size):
    content = file_of(tmp_path / "there", size)
    upload(tmp_path / "there", f"{url}/file")
    download(f"{url}/file", tmp_path / "back")
    assert (tmp_path / "back").read_bytes() == content
    assert not [*tmp_path.glob(".*")]


def test_small_objects_and_listings(url):
    object_urls.write(f"{url}/one", b"1")
    assert object_urls.entries(f"{url}/nowhere") == []
    object_urls.write(f"{url}/folder/two", b"22")
    assert object_urls.read(f"{url}/folder/two", 2)[0] == b"22"
    found = [(found.url.removeprefix(url), found.is_folder) for found in object_urls.entries(url)]
    assert found == [("/folder", True), ("/one", False)]
    found = [(found.url.removeprefix(url), found.size_bytes) for found in object_urls.objects_below(url)]
    assert found == [("/folder/two", 2), ("/one", 1)]
    for _ in range(2):
        object_urls.remove(f"{url}/one")
    assert [found.url for found in object_urls.entries(url)] == [f"{url}/folder"]


def test_what_is_not_as_expected_is_refused(url, tmp_path):
    object_urls.write(f"{url}/one", b"1", over="")
    with pytest.raises(ChangedObjectError):
        object_urls.write(f"{url}/one", b"2", over="")
    for missing in (f"{url}/two", url):
        with pytest.raises(MissingObjectError):
            download(missing, tmp_path / "back")
    with pytest.raises(ChangedObjectError):
        object_urls.read(f"{url}/one", 0)
    assert not (tmp_path / "back").exists()


def test_a_store_that_knows_no_conditions_is_written_without_them(monkeypatch):
    system = type(fsspec.filesystem("memory"))
    write = system.pipe_file
    monkeypatch.setattr(system, "pipe_file", lambda self, path, value: write(self, path, value, "overwrite"))
    object_urls.write("memory://plain/one", b"1", over="")
    assert object_urls.read("memory://plain/one", 1)[0] == b"1"


def test_another_clients_objects_are_seen_at_once_and_a_version_is_written_over_once(store):
    url = store.url("seen")
    assert object_urls.entries(url) == []
    store.put("seen/one", b"1")
    assert len(object_urls.entries(url)) == 1
    store.put("seen/one", b"11")
    assert [found.size_bytes for found in object_urls.entries(url)] == [2]
    _, first = object_urls.read(f"{url}/one", 2)
    object_urls.write(f"{url}/one", b"2", over=first)
    for old in (first, ""):
        with pytest.raises(ChangedObjectError):
            object_urls.write(f"{url}/one", b"3", over=old)
    assert store.objects("seen") == {"seen/one": b"2"}


def test_failures_and_cuts_are_tried_again(store, tmp_path):
    content = file_of(tmp_path / "there", 9_000_000)
    url = store.url("again")
    store.proxy.failures_left = 2
    upload(tmp_path / "there", url)
    assert store.proxy.failures_left == 0
    store.proxy.cut_after_answered_bytes, store.proxy.cuts_left = 300_000, 2
    download(url, tmp_path / "back")
    assert store.proxy.cuts_left == 0
    assert (tmp_path / "back").read_bytes() == content
    store.proxy.heal()
    store.proxy.cut_after_sent_bytes, store.proxy.cuts_left = 300_000, 2
    upload(tmp_path / "there", store.url("cut"))
    assert store.proxy.cuts_left == 0
    assert store.objects("cut") == {"cut": content}


@pytest.mark.parametrize("fault", ["is_frozen", "failures_left"])
def test_what_never_succeeds_ends_in_bounded_time_and_names_the_url(store, tmp_path, monkeypatch, fault):
    monkeypatch.setattr(object_urls, "STALL_SECONDS", 0.3)
    file_of(tmp_path / "there", 3_000_000)
    url = store.url("never")
    setattr(store.proxy, fault, 10**6)
    since_seconds = time.monotonic()
    with pytest.raises(StoreError, match=url):
        upload(tmp_path / "there", url)
    with pytest.raises(StoreError, match=url) as raised:
        download(url, tmp_path / "back")
    assert not isinstance(raised.value, FileNotFoundError)
    assert time.monotonic() - since_seconds < 60
    store.proxy.heal()
    assert store.objects("never") == {}
    assert not (tmp_path / "back").exists()


@pytest.mark.parametrize("path", ["S3:/b", "https:/host/x"])
def test_what_a_path_makes_of_a_url_is_refused_with_the_remedy(path):
    for refuse in (expand_path, lambda path: hvdtrain.load(Path(path))):
        with pytest.raises((ValueError, UsageError), match=r"write .*://.*, in Python as a str"):
            refuse(path)
    with pytest.raises(ValidationError, match="two slashes"):
        Config(framework="torch", run_dir=Path(path))


def test_passwords_tokens_and_signatures_are_refused_and_not_shown():
    for url, text in (
        ("sftp://me:SECRET@host/x", r"me:\*\*\*@host/x has a password"),
        ("HTTP://SECRET@host:80/x", r"://\*\*\*@.* has a token in it"),
        ("s3://SECRET@bucket/x", r"://\*\*\*@.* has a token in it"),
    ):
        with pytest.raises(ValueError, match=text) as raised:
            check_url(url)
        assert "SECRET" not in str(raised.value) + object_urls.shown(f"GET {url} failed")
    text = object_urls.shown("GET https://host/x?X-Amz-Signature=secret&part=1 failed")
    assert text == "GET https://host/x?X-Amz-Signature=***&part=1 failed"
    for fine in ("abfs://container@account/x", "sftp://me@host/x", "s3://bucket/a@b", "https://host?a@b"):
        assert check_url(fine) == object_urls.shown(fine) == fine


@pytest.fixture
def run_url(store, request, tmp_path, monkeypatch):
    """Return the URL of a run with three checkpoints."""
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    run = make_run(tmp_path / "made", window(1), evaluation(2))
    for step in (1, 2, 3):
        saved(run / "checkpoints", step, value=step, metrics={"loss": abs(step - 2) + 0.5})
    store.put_folder(run, request.node.name)
    return store.url(request.node.name)


def test_a_checkpoint_is_fetched_and_verified_and_the_best_one_is_chosen(run_url):
    for named in ("", "/checkpoints/step-00000003"):
        found = stored_checkpoints.locate(run_url + named)
        assert found.manifest.step == 3
        assert equal(found.read(), make_state(3))
        assert printable(f"of {found.path}") == f"of {run_url}/checkpoints/step-00000003"
    assert chosen_checkpoint(run_url, "loss") == f"{run_url}/checkpoints/step-00000002"
    assert chosen_checkpoint(run_url, False) == run_url
    with pytest.raises(CheckpointError, match="nothing"):
        chosen_checkpoint(run_url, "nothing")


def test_one_without_a_manifest_does_not_exist_and_a_damaged_one_is_passed_over(store, run_url):
    object_urls.remove(f"{run_url}/checkpoints/step-00000003/trainer.json")
    store.put(f"{run_url.partition('://bucket/')[2]}/checkpoints/step-00000002/model.safetensors", b"damaged")
    found = stored_checkpoints.locate(run_url)
    assert found.manifest.step == 1
    assert "step-00000002" in found.damaged[0]
    assert len(found.damaged) == 1
    for named in ("3", "2"):
        with pytest.raises(CheckpointError, match=f"step-0000000{named}"):
            stored_checkpoints.locate(f"{run_url}/checkpoints/step-0000000{named}")
