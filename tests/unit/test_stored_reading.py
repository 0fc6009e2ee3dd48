"""Runs and checkpoints in an object store, for those who read them from elsewhere."""

import pytest
from support.object_store import client_environment, object_store
from support.states import equal, make_state, saved
from support.stored_runs import evaluation, make_run, window

from hvdtrain.checkpoints.remote import stored_checkpoints
from hvdtrain.errors import CheckpointError
from hvdtrain.jobs.serving.checkpoint import chosen_checkpoint
from hvdtrain.storage import urls as object_urls
from hvdtrain.storage.text import printable

pytest.importorskip("s3fs")
pytest.importorskip("moto")


@pytest.fixture(scope="module")
def server():
    with object_store() as store, client_environment(store):
        object_urls.entries(store.url("nothing"))  # its thread is there before those of tests are counted
        yield store


@pytest.fixture
def store(server, tmp_path, monkeypatch):
    monkeypatch.setenv("HVDTRAIN_CACHE", str(tmp_path / "cache"))
    yield server
    server.proxy.heal()


@pytest.fixture
def url(store, request, tmp_path):
    """Return the URL of a run with three checkpoints."""
    run = make_run(tmp_path / "made", window(1), evaluation(2))
    for step in (1, 2, 3):
        saved(run / "checkpoints", step, value=step, metrics={"loss": abs(step - 2) + 0.5})
    store.put_folder(run, request.node.name)
    return store.url(request.node.name)


@pytest.mark.parametrize("named", ["", "/checkpoints/step-00000003"])
def test_a_checkpoint_is_fetched_and_verified(url, named):
    found = stored_checkpoints.locate(url + named)
    assert found.manifest.step == 3
    assert equal(found.read(), make_state(3))
    assert printable(f"of {found.path}") == f"of {url}/checkpoints/step-00000003"


def test_the_best_one_is_chosen(url):
    assert chosen_checkpoint(url, "loss") == f"{url}/checkpoints/step-00000002"
    assert chosen_checkpoint(url, False) == url
    with pytest.raises(CheckpointError, match="nothing"):
        chosen_checkpoint(url, "nothing")


def test_one_without_a_manifest_does_not_exist_and_a_damaged_one_is_passed_over(store, url):
    object_urls.remove(f"{url}/checkpoints/step-00000003/trainer.json")
    store.put(f"{url.partition('://bucket/')[2]}/checkpoints/step-00000002/model.safetensors", b"damaged")
    found = stored_checkpoints.locate(url)
    assert found.manifest.step == 1
    assert "step-00000002" in found.damaged[0]
    assert len(found.damaged) == 1
    for named in ("3", "2"):
        with pytest.raises(CheckpointError, match=f"step-0000000{named}"):
            stored_checkpoints.locate(f"{url}/checkpoints/step-0000000{named}")
