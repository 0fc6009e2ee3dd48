"""No fault of a store makes a job take, lose or forget a checkpoint without a word."""

from types import SimpleNamespace

import pytest
from support.states import contents, saved
from support.store_jobs import Job, stored

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote.run_store import UploadingSaver
from hvdtrain.checkpoints.remote.stored_checkpoints import StoredCheckpoints
from hvdtrain.errors import CheckpointError
from hvdtrain.reporting.report import Report
from hvdtrain.storage.urls import StoreError


@pytest.mark.parametrize("continues", [True, False])
def test_an_uploaded_copy_goes_only_if_the_store_continues_it(store, tmp_path, continues):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.end()
    if not continues:  # as if the URL were another account's now
        for name in list(store.objects()):
            store.remove(name)
    other = Job(store, tmp_path / "elsewhere", "auto" if continues else "", start=0 if continues else None)
    other.uploader.start(1 if continues else None)
    other.save(2)
    other.end()
    again = Job(store, tmp_path / "copy", "auto")
    assert again.begun.newest == storage.name_of(2)
    assert (tmp_path / "copy-set-aside-1").exists() is not continues
    assert any("is set aside as" in note for note in again.begun.notes) is not continues


def test_a_run_that_went_back_stays_there_though_the_store_was_down(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    for step in (1, 2, 3):
        job.save(step)
    job.end()
    folder = job.folder / "checkpoints"
    job = Job(store, tmp_path / "copy", storage.name_of(1), start=1)
    for step in (2, 3):
        storage.quarantine(folder / storage.name_of(step))
    store.fail(lambda method, path: method == "cp_file" and "step-00000002" in path)
    with pytest.raises(StoreError):
        job.uploader.round()  # which has set the last one aside by then
    store.heal()
    job.killed()
    again = Job(store, tmp_path / "copy", "auto", start=1)
    assert again.begun.newest == storage.name_of(1)
    again.save(2, value=5.0)
    again.end()
    assert stored(store) == [1, 2]
    assert again.uploader.copy.state.later == []


def test_a_step_that_is_saved_again_is_uploaded_again(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.uploader.round()
    path = job.save(1, value=9.0)
    assert job.uploader.unfinished() == [path.name]
    job.uploader.round()
    found = StoredCheckpoints(store.url).fetch(path.name, tmp_path / "fetched")
    assert contents(found) == contents(path)


def test_a_run_of_which_no_checkpoint_verifies_does_not_begin_anew(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.save(2)
    job.end()
    before = {name: data for name, data in store.objects().items() if "checkpoints" in name}
    store.fail(lambda method, path: method == "info" and "model" in path, FileNotFoundError("a bad gateway"))
    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged.*step-00000001 is damaged"):
        Job(store, tmp_path / "elsewhere", "auto")
    store.heal()
    assert {name: data for name, data in store.objects().items() if "checkpoints" in name} == before
    assert Job(store, tmp_path / "third", "auto", start=None).begun.newest == storage.name_of(2)


@pytest.mark.parametrize("is_all_uploaded", [True, False])
def test_the_copy_of_a_completed_run_stays_if_something_in_it_was_not_uploaded(tmp_path, is_all_uploaded):
    folder = tmp_path / "copy"
    made = saved(folder / "checkpoints", 1)
    if not is_all_uploaded:
        made.rename(made.with_name("set-aside-step-00000001"))
    store = SimpleNamespace(is_open=True, folder=folder, close=lambda seconds: True)
    saver = UploadingSaver(folder / "checkpoints", Report(), store)
    saver.is_complete = True
    said = saver.close(1.0)
    assert folder.exists() is not is_all_uploaded
    assert ("these are not in the store: checkpoints/set-aside-step-00000001" in said) is not is_all_uploaded
