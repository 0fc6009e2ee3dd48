"""Which checkpoints of a run directory at a URL are deleted, and when."""

import pytest
from support.store_jobs import Job, stored

from hvdtrain.checkpoints import storage
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.storage.urls import StoreError


def test_retention_deletes_checkpoints_alone(store, tmp_path):
    other = Job(store, tmp_path / "other")
    other.save(5)
    other.end()
    store.put("checkpoints/step-00000003/model.safetensors", b"of an upload that was cut")
    store.put("checkpoints/notes.txt", b"mine")
    store.put("notes.txt", b"mine")
    job = Job(store, tmp_path / "copy", True, start=5, keep_last=1)
    for step in (6, 7, 8):
        job.save(step)
        job.round()
        storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(step)})
    job.round()
    job.end()
    assert stored(store) == [8]
    assert store.objects()["checkpoints/notes.txt"] == store.objects()["notes.txt"] == b"mine"
    assert not any("step-00000003" in name for name in store.objects())


def test_the_best_checkpoint_stays_also_if_another_host_resumes(store, tmp_path):
    goal = MetricGoal("loss", highest=False)
    job = Job(store, tmp_path / "copy", keep_last=1, goal=goal)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        job.save(step, metrics={"loss": loss})
        job.round()
    job.end()
    job = Job(store, tmp_path / "elsewhere", True, start=3, keep_last=1, goal=goal)
    assert job.uploader.values("loss") == {
        storage.name_of(1): 3.0,
        storage.name_of(2): 1.0,
        storage.name_of(3): 2.0,
    }
    job.save(4, metrics={"loss": 2.5})
    storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(4)})
    job.end()
    assert stored(store) == [2, 4]


def test_nothing_is_deleted_before_what_is_kept_is_whole(store, tmp_path):
    job = Job(store, tmp_path / "copy", keep_last=1)
    job.save(1)
    job.round()
    job.save(2)
    storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(2)})
    store.fail(lambda method, path: method == "put_file" and "step-00000002/optimizer" in path)
    with pytest.raises(StoreError, match="the store is down"):
        job.round()
    assert stored(store) == [1]
    store.heal()
    job.round()
    assert stored(store) == [2]


def test_where_deleting_is_refused_uploads_continue(store, tmp_path):
    job = Job(store, tmp_path / "copy", keep_last=1)
    store.fail(lambda method, path: method == "rm_file", PermissionError("Access Denied"))
    for step in (1, 2, 3):
        job.save(step)
        storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(step)})
        job.round()
    assert stored(store) == [1, 2, 3]
    assert len([note for note in job.notes if "older checkpoints stay" in note]) == 1


def test_the_store_does_not_fill_up_while_uploads_lag_behind(store, tmp_path):
    job = Job(store, tmp_path / "copy", keep_last=1)
    steps = iter(range(2, 12))

    def save_meanwhile(method, path):
        if path.endswith("trainer.json") and method == "pipe_file" and (step := next(steps, None)):
            job.save(step)
            folder = job.folder / "checkpoints"
            storage.retain(folder, {folder / storage.name_of(step)})
        most.append(len([name for name in store.objects() if name.endswith("trainer.json")]))
        return False

    most: list[int] = []
    job.save(1)
    store.fail(save_meanwhile)
    job.round()
    store.heal()
    assert stored(store) == [11]
    assert max(most) <= 2
