"""Runs in a store that another job, of this host or another, goes on with."""

import shutil

import pytest
from support.states import contents
from support.store_jobs import Job, stored

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote.stored_checkpoints import StoredCheckpoints
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.storage.urls import StoreError


def test_another_host_resumes_from_the_store_alone(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    path = job.save(2)
    job.uploader.round(is_last=True)
    job.killed()
    shutil.copytree(path, tmp_path / "expected")
    shutil.rmtree(job.folder)
    elsewhere = Job(store, tmp_path / "elsewhere", "auto", start=None)
    assert elsewhere.begun.newest == storage.name_of(2)
    assert contents(elsewhere.folder / "checkpoints" / path.name) == contents(tmp_path / "expected")
    assert (elsewhere.folder / "metrics.jsonl").read_text() == '{"step": 1}\n{"step": 2}\n'


def test_what_was_not_uploaded_is_uploaded_by_the_next_job_of_this_host(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.uploader.round()
    store.fail(lambda method, path: True)
    job.save(2)
    with pytest.raises(StoreError):
        job.uploader.round()
    store.heal()
    job.killed()
    again = Job(store, tmp_path / "copy", "auto", start=2)
    assert again.begun.newest == storage.name_of(2)
    assert "step-00000002 is not in faulty://bucket/run yet" in again.begun.notes[0]
    again.end()
    assert stored(store) == [1, 2]
    assert store.objects()["metrics.jsonl"] == b'{"step": 1}\n{"step": 2}\n'


def test_a_copy_of_a_run_that_went_on_elsewhere_gives_way(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.uploader.round()
    job.save(2, value=2.0)  # which is not uploaded
    job.killed()
    other = Job(store, tmp_path / "elsewhere", "auto", start=1)
    other.save(3, value=3.0)
    other.end()
    again = Job(store, tmp_path / "copy", "auto", start=3)
    assert again.begun.newest == storage.name_of(3)
    assert "is set aside as" in again.begun.notes[0]
    kept = tmp_path / "copy-set-aside-1" / "checkpoints" / storage.name_of(2)
    assert kept.is_dir()
    assert [path.name for path in storage.checkpoints_in(again.folder / "checkpoints")] == [
        storage.name_of(3)
    ]


def test_later_checkpoints_in_the_store_are_set_aside_whole(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    for step in (1, 2, 3):
        job.save(step)
    job.end()
    before = store.objects()
    name = storage.name_of(1)
    job = Job(store, tmp_path / "elsewhere", name, start=1)
    job.save(2, value=5.0)
    job.end()
    assert stored(store) == [1, 2]
    now = store.objects()
    for step in (2, 3):
        for file in ("model.safetensors", "trainer.json"):
            old = before[f"checkpoints/step-0000000{step}/{file}"]
            assert now[f"checkpoints/set-aside-step-0000000{step}/{file}"] == old


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "trainer.json"])
@pytest.mark.parametrize("damage", ["changed", "shorter", "missing"])
def test_a_damaged_checkpoint_is_passed_over_until_the_run_goes_on(store, tmp_path, file, damage):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.save(2)
    job.end()
    place = f"checkpoints/step-00000002/{file}"
    content = store.objects()[place]
    if damage == "missing":
        store.remove(place)
    else:
        store.put(place, content[:-1] + (b"" if damage == "shorter" else b"\x00"))
    other = Job(store, tmp_path / "elsewhere", "auto", start=None)
    assert other.begun.newest == storage.name_of(1)
    if (damage, file) != ("missing", "trainer.json"):  # without a manifest it does not exist
        assert f"{storage.name_of(2)} is damaged" in other.begun.notes[0]
        assert "it is passed over" in other.begun.notes[0]
    assert storage.name_of(2) in StoredCheckpoints(store.url).names()
    other.uploader.start(1)
    other.uploader.round()
    if (damage, file) != ("missing", "trainer.json"):
        assert "set aside as set-aside-step-00000002" in " ".join(other.notes)
    assert stored(store) == [1]


def test_a_named_checkpoint_that_is_damaged_is_an_error(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.end()
    store.put("checkpoints/step-00000001/model.safetensors", b"")
    with pytest.raises(CheckpointError, match="step-00000001 is damaged"):
        Job(store, tmp_path / "elsewhere", storage.name_of(1))
    with pytest.raises(CheckpointError, match=r"there is no checkpoint .*step-00000009"):
        Job(store, tmp_path / "third", storage.name_of(9))


def test_a_store_with_a_run_refuses_a_new_one(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.end()
    with pytest.raises(ConfigError, match="already holds a run"):
        Job(store, tmp_path / "elsewhere")
    Job(store, tmp_path / "third", "auto")  # the claim was not kept


def test_a_copy_that_is_in_no_store_refuses_a_new_run(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    store.fail(lambda method, path: "step-" in path)
    with pytest.raises(StoreError):
        job.uploader.round()
    store.heal()
    job.uploader.close()
    for name in list(store.objects()):
        store.remove(name)
    with pytest.raises(ConfigError, match="holds a run of faulty://bucket/run that is not in the store"):
        Job(store, tmp_path / "copy")
    assert Job(store, tmp_path / "copy", "auto").begun.newest == storage.name_of(1)
