"""What a run directory at a URL holds at any moment while a working copy is uploaded to it."""

import json
import random
from contextlib import suppress

import pytest
from support.states import contents
from support.store_jobs import Job, stored, verified

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote import stored_checkpoints
from hvdtrain.checkpoints.remote.stored_checkpoints import StoredCheckpoints
from hvdtrain.storage.urls import StoreError


def test_a_run_is_in_the_store_as_it_is_here(store, tmp_path):
    job = Job(store, tmp_path / "copy", start=None)
    (job.folder / "config.yaml").write_text("a: 1\n")
    (job.folder / "indices").mkdir()
    (job.folder / "indices" / "rank-0.jsonl").write_text("{}\n")
    (job.folder / ".lock").write_text("mine")
    job.uploader.start(None)
    job.save(1)
    job.end()
    found = store.objects()
    found.pop("hvdtrain.claim")
    here = {name: data for name, data in contents(job.folder).items() if not name.startswith(".")}
    assert found == here
    assert "indices/rank-0.jsonl" in found
    assert "checkpoints/step-00000001/trainer.json" in found


def test_the_manifest_comes_last_and_after_the_log(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.uploader.round()
    written = [path for method, path in store.requests() if method in ("put_file", "pipe_file")]
    own = [path.removeprefix("/bucket/run/") for path in written if "claim" not in path]
    assert own[0] == "metrics.jsonl"
    assert [name.rpartition("/")[2] for name in own if "step-" in name] == [
        "model.safetensors",
        "optimizer.safetensors",
        "trainer.json",
    ]


def test_fifty_cuts_leave_no_checkpoint_that_is_wrong_and_lose_none(store, tmp_path):
    chosen = random.Random(3)
    job = Job(store, tmp_path / "copy", keep_last=2)
    whole = set()
    for number in range(50):
        step = number + 1
        job.save(step, value=float(step))
        left = chosen.randrange(60)

        def fails(method, path):
            nonlocal left
            left -= 1
            return left < 0

        store.fail(fails)
        with suppress(StoreError):
            job.uploader.round()
        store.heal()
        now = set(verified(store, tmp_path / "fetched"))
        kept = set(sorted(now | whole)[-2:])
        assert kept & whole <= now
        whole = now
        folder = job.folder / "checkpoints"
        storage.retain(folder, set(storage.checkpoints_in(folder)[-2:]))
    job.end()
    assert stored(store) == [49, 50]
    found = StoredCheckpoints(store.url).fetch(storage.name_of(50), tmp_path / "last")
    assert contents(found) == contents(job.folder / "checkpoints" / found.name)


def test_what_the_store_changes_on_its_way_is_no_checkpoint(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    before = store.put

    def damage(method, path):
        if method == "info" and path.endswith("optimizer.safetensors"):
            before("checkpoints/step-00000001/optimizer.safetensors", b"x" * 10)
        return False

    store.fail(damage)
    with pytest.raises(StoreError, match=r"optimizer.safetensors is not what was uploaded"):
        job.uploader.round()
    assert stored(store) == []
    store.heal()
    job.uploader.round()
    assert verified(store, tmp_path / "fetched") == [1]


def test_a_job_that_is_cut_off_writes_nothing_over_its_successor(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.uploader.round()
    claimed = json.loads(store.objects()["hvdtrain.claim"])
    store.put("hvdtrain.claim", json.dumps(claimed | {"id": "another", "host": "h9", "process": 7}).encode())
    before = store.objects()
    job.save(2)
    for is_last in (False, True):
        with pytest.raises(StoreError, match="was taken over by another job: process 7 on h9"):
            job.uploader.round(is_last=is_last)
    job.uploader.close()
    assert store.objects() == before


def test_a_manifest_that_comes_late_does_not_take_the_place_of_the_successors(store, tmp_path, monkeypatch):
    """A job that was frozen as it sent it wakes up when its successor has saved the same step."""
    monkeypatch.setattr(stored_checkpoints, "is_s3", lambda url: True)
    job = Job(store, tmp_path / "copy")
    job.save(1)
    manifest = "checkpoints/step-00000001/trainer.json"

    def succeed(method, path):
        if method == "pipe_file" and path.endswith(manifest):
            store.put(manifest, b"the successor's")
        return False

    store.fail(succeed)
    with pytest.raises(StoreError, match="is not what was uploaded"):
        job.uploader.round()
    assert store.objects()[manifest] == b"the successor's"


def test_what_a_former_job_wrote_when_it_came_back_is_removed_in_its_turn(store, tmp_path):
    job = Job(store, tmp_path / "copy", keep_last=1)
    folder = job.folder / "checkpoints"
    for step in (1, 2, 3):
        job.save(step)
        storage.retain(folder, {folder / storage.name_of(step)})
        manifest = (folder / storage.name_of(step) / "trainer.json").read_bytes()
        job.uploader.round()
        if step == 2:
            store.put("checkpoints/step-00000001/trainer.json", manifest)
            store.put("checkpoints/step-00000000/model.safetensors", b"mine")
    found = {name.split("/")[1] for name in store.objects() if name.startswith("checkpoints/")}
    assert found == {"step-00000000", "step-00000003"}


def test_a_job_that_ends_before_it_trains_leaves_the_store_as_it_was(store, tmp_path):
    job = Job(store, tmp_path / "copy", start=None)
    job.uploader.close()
    assert store.objects() == {}


def test_a_log_that_grows_while_it_is_uploaded_is_uploaded_up_to_a_line(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    log = job.folder / "metrics.jsonl"

    def grow(method, path):
        if method == "put_file" and path.endswith("metrics.jsonl"):
            with log.open("a") as file:
                file.write('{"step": 9}\n')
        return False

    store.fail(grow)
    job.uploader.round()
    store.heal()
    assert store.objects()["metrics.jsonl"] == b'{"step": 1}\n'
    job.uploader.round(is_last=True)
    assert store.objects()["metrics.jsonl"] == b'{"step": 1}\n{"step": 9}\n'


def test_a_damaged_checkpoint_here_is_not_uploaded_and_does_not_hold_up_others(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    path = job.save(2)
    job.save(1)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-1] + b"\x01")
    job.uploader.round()
    assert stored(store) == [1]
    assert "step-00000002 is damaged and is not uploaded" in " ".join(job.notes)
    assert not job.uploader.is_done()
