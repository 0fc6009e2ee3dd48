"""What a run directory at a URL holds at any moment while a working copy is uploaded to it."""

import json
import random
import shutil
from contextlib import suppress

import pytest
from support.states import contents
from support.store_jobs import ONCE, Job, stored, verified

from hvdtrain.checkpoints import storage
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import CheckpointError, ConfigError
from hvdtrain.object_urls import StoreError
from hvdtrain.stores import stored_checkpoints
from hvdtrain.stores.stored_checkpoints import StoredCheckpoints


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


def test_retention_deletes_only_what_this_run_wrote(store, tmp_path):
    other = Job(store, tmp_path / "other")
    other.save(5, url="faulty://bucket/another")
    other.end()
    store.put("checkpoints/step-00000003/notes.txt", b"mine")
    store.put("notes.txt", b"mine")
    job = Job(store, tmp_path / "copy", "auto", start=5, keep_last=1)
    for step in (6, 7, 8):
        job.save(step)
        job.uploader.round()
        storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(step)})
    job.uploader.round()
    job.end()
    assert stored(store) == [5, 8]
    assert store.objects()["checkpoints/step-00000003/notes.txt"] == b"mine"
    assert store.objects()["notes.txt"] == b"mine"


def test_the_checkpoint_that_was_resumed_from_by_name_stays(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(5)
    job.end()
    name = storage.name_of(5)
    job = Job(store, tmp_path / "elsewhere", name, start=5, keep_last=1, spared=(name,))
    for step in (6, 7):
        job.save(step)
        storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(step)})
        job.uploader.round()
    assert stored(store) == [5, 7]


def test_the_best_checkpoint_stays_also_if_another_host_resumes(store, tmp_path):
    goal = MetricGoal("loss", highest=False)
    job = Job(store, tmp_path / "copy", keep_last=1, goal=goal)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0)):
        job.save(step, metrics={"loss": loss})
        job.uploader.round()
    job.end()
    job = Job(store, tmp_path / "elsewhere", "auto", start=3, keep_last=1, goal=goal)
    assert job.begun.values == {storage.name_of(1): 3.0, storage.name_of(2): 1.0, storage.name_of(3): 2.0}
    job.save(4, metrics={"loss": 2.5})
    storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(4)})
    job.end()
    assert stored(store) == [2, 4]


def test_nothing_is_deleted_before_what_is_kept_is_whole(store, tmp_path):
    job = Job(store, tmp_path / "copy", keep_last=1)
    job.save(1)
    job.uploader.round()
    job.save(2)
    storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(2)})
    store.fail(lambda method, path: method == "put_file" and "step-00000002/optimizer" in path)
    with pytest.raises(StoreError, match="the store is down"):
        job.uploader.round()
    assert stored(store) == [1]
    store.heal()
    job.uploader.round()
    assert stored(store) == [2]


def test_what_could_not_be_read_back_stays_until_enough_newer_ones_are_whole(store, tmp_path):
    job = Job(store, tmp_path / "copy", keep_last=2)
    folder, written = job.folder / "checkpoints", []

    def lose_answers(method, path):
        is_manifest = path.endswith("step-00000001/trainer.json")
        if is_manifest and method == "pipe_file":
            written.append(path)
        return is_manifest and method != "pipe_file" and bool(written)

    job.save(1)
    store.fail(lose_answers)
    with pytest.raises(StoreError, match="the store is down"):
        job.uploader.round()
    store.heal()
    found = []
    for step in (2, 3):
        job.save(step)
        storage.retain(folder, {folder / storage.name_of(step)})
        job.uploader.round()
        found.append(stored(store))
    assert found == [[1, 2], [2, 3]]


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
    job.uploader.round()
    store.heal()
    assert stored(store) == [11]
    assert max(most) <= 2


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


def test_a_run_that_was_removed_from_the_store_can_begin_anew(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.end()
    for name in list(store.objects()):
        store.remove(name)
    again = Job(store, tmp_path / "copy")
    assert again.uploader.copy.steps() == []
    assert "no longer has the run" in again.begun.notes[0]
    assert (tmp_path / "copy-set-aside-1" / "checkpoints" / storage.name_of(1)).is_dir()


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


def test_a_job_that_ends_before_it_trains_leaves_the_store_as_it_was(store, tmp_path):
    job = Job(store, tmp_path / "copy", start=None)
    job.uploader.close()
    assert store.objects() == {}


def test_the_summary_of_the_job_before_goes_when_the_run_goes_on(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    (job.folder / "summary.json").write_text("{}")
    job.end()
    other = Job(store, tmp_path / "elsewhere", "auto", start=None)
    (other.folder / "summary.json").unlink()
    other.uploader.start(1)
    other.uploader.round()
    assert "summary.json" not in store.objects()


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


def test_a_store_that_is_down_at_the_start_is_named(store, tmp_path):
    store.fail(lambda method, path: method != "rm_file")
    with pytest.raises(StoreError, match=r"run/hvdtrain.claim cannot be read: the store is down"):
        Job(store, tmp_path / "copy")


def test_a_store_that_deletes_nothing_gets_checkpoints_and_logs(store, tmp_path):
    first = Job(store, tmp_path / "first")
    first.save(1)
    (first.folder / "summary.json").write_text("{}")
    first.end()
    store.fail(lambda method, path: method == "rm_file", PermissionError("denied"))
    job = Job(store, tmp_path / "copy", "auto", start=1, keep_last=1)
    (job.folder / "summary.json").unlink()
    for step in (2, 3):
        job.save(step)
        storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / storage.name_of(step)})
        job.uploader.round()
    job.end()
    assert stored(store) == [1, 2, 3]
    assert store.objects()["metrics.jsonl"] == (job.folder / "metrics.jsonl").read_bytes()
    assert len([text for text in job.notes if "denied" in text]) == 1


def test_a_new_run_deletes_nothing(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.uploader.round()
    assert "rm_file" not in [method for method, _ in store.requests()]


def test_a_large_object_may_take_longer_to_be_copied_in_the_store(store, tmp_path, monkeypatch):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.end()
    before, allowed = stored_checkpoints.request, []

    def request(url, done, patience, method, *arguments, **options):
        allowed.append(patience.stall_seconds)
        return before(url, done, patience, method, *arguments, **options)

    monkeypatch.setattr(stored_checkpoints, "request", request)
    monkeypatch.setattr(stored_checkpoints, "_COPIED_BYTES_PER_SECOND", 1.0)
    StoredCheckpoints(store.url, ONCE).set_aside(storage.name_of(1))
    assert min(allowed) > 100.0
    assert stored(store) == []
