"""Runs in a store that another job, of this host or another, goes on with."""

import pytest
from support.store_jobs import Job, stored

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote.stored_checkpoints import names_in
from hvdtrain.errors import CheckpointError, ConfigError


def test_a_copy_of_a_run_that_another_host_continued_is_set_aside(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.round()
    job.save(2, value=2.0)  # which is not uploaded
    job.killed()
    other = Job(store, tmp_path / "elsewhere", True, start=1)
    other.save(3, value=3.0)
    other.end()
    again = Job(store, tmp_path / "copy", True, start=3)
    assert again.uploader.newest == storage.name_of(3)
    assert "is set aside as" in again.notes[0]
    (kept,) = tmp_path.glob(f"copy-set-aside-*/checkpoints/{storage.name_of(2)}")
    assert kept.is_dir()
    assert [path.name for path in storage.checkpoints_in(again.folder / "checkpoints")] == [
        storage.name_of(3)
    ]


@pytest.mark.parametrize("file", ["optimizer.safetensors", "trainer.json"])
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
    other = Job(store, tmp_path / "elsewhere", True, start=None)
    assert other.uploader.newest == storage.name_of(1)
    exists = (damage, file) != ("missing", "trainer.json")  # without a manifest it does not
    assert any("step-00000002 is damaged" in note for note in other.notes) is exists
    assert storage.name_of(2) in names_in(f"{store.url}/checkpoints")
    other.uploader.start(1)
    other.round()
    assert ("set aside as set-aside-step-00000002" in " ".join(other.notes)) is exists
    assert stored(store) == [1]


def test_a_run_of_which_no_checkpoint_verifies_does_not_begin_anew(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.save(2)
    job.end()
    before = {name: data for name, data in store.objects().items() if "checkpoints" in name}
    store.fail(lambda method, path: method == "info" and "model" in path, FileNotFoundError("a bad gateway"))
    with pytest.raises(CheckpointError, match=r"step-00000002 is damaged.*step-00000001 is damaged"):
        Job(store, tmp_path / "elsewhere", True)
    store.heal()
    assert {name: data for name, data in store.objects().items() if "checkpoints" in name} == before
    assert Job(store, tmp_path / "third", True, start=None).uploader.newest == storage.name_of(2)


def test_a_copy_that_is_in_no_store_refuses_a_new_run(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.killed()
    for name in list(store.objects()):
        store.remove(name)
    with pytest.raises(ConfigError, match="has a run on this host alone"):
        Job(store, tmp_path / "copy")
    assert Job(store, tmp_path / "copy", True).uploader.newest == storage.name_of(1)
