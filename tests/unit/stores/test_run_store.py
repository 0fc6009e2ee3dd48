"""A run directory at a URL: what it holds while it is uploaded to, kept small and resumed; whose it is."""

import itertools
import json
import random
import socket
import time
from contextlib import suppress

import pytest
from support.fakes import FakeReport
from support.faulty_store import FaultyStore
from support.states import contents, make_record, saved
from support.store_jobs import Job, stored, verified

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote import claim
from hvdtrain.checkpoints.remote.claim import CLAIM_FILE, Claim
from hvdtrain.checkpoints.remote.run_store import RunStore
from hvdtrain.checkpoints.remote.stored_checkpoints import fetch, names_in
from hvdtrain.checkpoints.saver import BackgroundSaver
from hvdtrain.checkpoints.storage import name_of
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import CheckpointError, ConfigError, EnvironmentFault
from hvdtrain.jobs.run_directory.folder import end_uploads, published
from hvdtrain.storage.urls import StoreError


@pytest.fixture
def store(monkeypatch):
    monkeypatch.setattr(claim, "_SETTLE_SECONDS", 0.0)
    monkeypatch.setattr(claim, "_LOOK_SECONDS", 0.01)
    monkeypatch.setattr(claim, "FRESH_SECONDS", 5.0)
    made = FaultyStore()
    yield made
    made.heal()


def fetched(store, path, folder):
    return fetch(f"{store.url}/checkpoints/{path.name}", folder)


def test_a_run_is_in_the_store_as_it_is_here(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    (job.folder / "indices").mkdir()
    (job.folder / "indices" / "rank-0.jsonl").write_text("{}\n")
    (job.folder / ".lock").write_text("mine")
    job.save(1)
    job.end()
    found = store.objects()
    found.pop("hvdtrain.claim")
    assert found == {name: data for name, data in contents(job.folder).items() if name[0] != "."}
    assert {"indices/rank-0.jsonl", "checkpoints/step-00000001/trainer.json"} <= set(found)


def test_fifty_cuts_leave_no_checkpoint_that_is_wrong_and_lose_none(store, tmp_path):
    chosen = random.Random(3)
    job = Job(store, tmp_path / "copy", keep_last=2)
    whole = set()
    for step in range(1, 51):
        job.save(step, value=float(step))
        left = chosen.randrange(40)

        def fails(method, path):
            nonlocal left
            left -= 1
            return left < 0

        store.fail(fails)
        with suppress(StoreError):
            job.round()
        store.heal()
        now = set(verified(store, tmp_path / "fetched"))
        assert {*sorted(now | whole)[-2:]} & whole <= now
        whole = now
        folder = job.folder / "checkpoints"
        storage.retain(folder, set(storage.checkpoints_in(folder)[-2:]))
    job.end()
    assert stored(store) == [49, 50]
    path = job.folder / "checkpoints" / name_of(50)
    assert contents(fetched(store, path, tmp_path / "last")) == contents(path)


def test_a_job_that_is_cut_off_writes_nothing_over_its_successor(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.round()
    claimed = json.loads(store.objects()["hvdtrain.claim"])
    store.put("hvdtrain.claim", json.dumps(claimed | {"id": "another", "host": "h9", "process": 7}).encode())
    before = store.objects()
    job.save(2)
    for is_last in (False, True):
        with pytest.raises(StoreError, match="was taken over by another job: process 7 on h9"):
            job.round(is_last=is_last)
    job.uploader.close(0.0)
    assert store.objects() == before


def test_a_log_that_grows_while_it_is_uploaded_is_uploaded_again(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    log = job.folder / "metrics.jsonl"

    def grow(method, path):
        if method == "info" and path.endswith("metrics.jsonl"):
            with log.open("a") as file:
                file.write('{"step": 9}\n')
        return False

    store.fail(grow)
    job.round()
    store.heal()
    job.round(is_last=True)
    assert store.objects()["metrics.jsonl"] == log.read_bytes()


def test_a_damaged_checkpoint_here_is_not_uploaded_and_does_not_hold_up_others(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    path = job.save(2)
    job.save(1)
    content = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(content[:-1] + b"\x01")
    job.round()
    assert stored(store) == [1]
    assert "step-00000002 is damaged and is not uploaded" in " ".join(job.notes)
    assert not job.uploader.is_done()


def test_what_a_job_writes_is_whole_when_it_was_waited_for_and_its_copy_goes(tmp_path):
    url, folder = f"file://{tmp_path}/store/a run", tmp_path / "copy"
    run_store = RunStore(url, folder)
    run_store.begin(False)
    report = FakeReport()
    saver = BackgroundSaver(folder / "checkpoints", report, store=run_store)
    run_store.start(None)
    (folder / "metrics.jsonl").write_text("{}\n")
    saved(folder / "checkpoints", 3, config=make_record().config | {"run_dir": url})
    assert run_store.flush(lambda: (60.0, 120.0), print)
    assert published(saver) == (f"{url}/checkpoints/step-00000003", None)
    end_uploads(saver, report, 60.0)
    assert not folder.exists()
    with pytest.raises(ConfigError, match="already holds a run\nGive --resume without a checkpoint"):
        (second := RunStore(url, tmp_path / "h2")).begin(False)
    second.close(0.0)
    (third := RunStore(url, tmp_path / "h3")).begin(True)
    third.close(0.0)
    assert third.newest == "step-00000003"


def test_a_working_copy_stays_if_it_holds_what_is_not_uploaded(store, tmp_path):
    folder = tmp_path / "copy"
    job = Job(store, folder)
    job.save(1)
    others = (".hydra/config.yaml", "poetry.lock", "checkpoints/set-aside-step-00000002/trainer.json")
    for name in others:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("")
    (folder / "link").symlink_to(tmp_path, target_is_directory=True)
    report = FakeReport()
    saver = BackgroundSaver(folder / "checkpoints", report, store=job.uploader)
    job.round(is_last=True)
    end_uploads(saver, report, 1.0)
    said = " ".join(report.notes)
    assert folder.is_dir()
    assert all(name in said for name in (*others, "link"))


def test_a_step_that_is_saved_again_is_uploaded_again(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.round()
    path = job.save(1, value=9.0)
    assert job.uploader.unfinished() == [path.name]
    job.round()
    assert contents(fetched(store, path, tmp_path / "fetched")) == contents(path)


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
        storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / name_of(step)})
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
    assert job.uploader.values("loss") == {name_of(1): 3.0, name_of(2): 1.0, name_of(3): 2.0}
    job.save(4, metrics={"loss": 2.5})
    storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / name_of(4)})
    job.end()
    assert stored(store) == [2, 4]


def test_where_deleting_is_refused_uploads_continue(store, tmp_path):
    job = Job(store, tmp_path / "copy", keep_last=1)
    store.fail(lambda method, path: method == "rm_file", PermissionError("Access Denied"))
    for step in (1, 2, 3):
        job.save(step)
        storage.retain(job.folder / "checkpoints", {job.folder / "checkpoints" / name_of(step)})
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
            storage.retain(folder, {folder / name_of(step)})
        most.append(len([name for name in store.objects() if name.endswith("trainer.json")]))
        return False

    most: list[int] = []
    job.save(1)
    store.fail(save_meanwhile)
    job.round()
    store.heal()
    assert stored(store) == [11]
    assert max(most) <= 2


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
    assert again.uploader.newest == name_of(3)
    assert "is set aside as" in again.notes[0]
    (kept,) = tmp_path.glob(f"copy-set-aside-*/checkpoints/{name_of(2)}")
    assert kept.is_dir()
    assert [path.name for path in storage.checkpoints_in(again.folder / "checkpoints")] == [name_of(3)]


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
    assert other.uploader.newest == name_of(1)
    exists = (damage, file) != ("missing", "trainer.json")  # without a manifest it does not
    assert any("step-00000002 is damaged" in note for note in other.notes) is exists
    assert name_of(2) in names_in(f"{store.url}/checkpoints")
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
    assert Job(store, tmp_path / "third", True, start=None).uploader.newest == name_of(2)


def test_a_copy_that_is_in_no_store_refuses_a_new_run(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.killed()
    for name in list(store.objects()):
        store.remove(name)
    with pytest.raises(ConfigError, match="has a run on this host alone"):
        Job(store, tmp_path / "copy")
    assert Job(store, tmp_path / "copy", True).uploader.newest == name_of(1)


def put(store, host="h9", **fields):
    other = {"id": "another", "host": host, "process": 77, "since": "2026-01-01", "writer": "", **fields}
    store.put(CLAIM_FILE, json.dumps(other).encode())


def claimed(store):
    return json.loads(store.objects()[CLAIM_FILE])


def test_a_free_run_directory_is_claimed_and_released(store):
    own = Claim(store.url)
    own.acquire()
    assert claimed(store)["id"] == own.id
    own.writer = own.id
    own.update()
    own.release()
    assert claimed(store)["is_released"]
    Claim(store.url).acquire()


def test_a_job_that_lives_is_named_to_the_second_one(store, monkeypatch):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 600.0)
    put(store)
    beats, sleep = itertools.count(1), time.sleep
    monkeypatch.setattr(claim.time, "sleep", lambda seconds: put(store, beat=next(beats)) or sleep(seconds))
    with pytest.raises(EnvironmentFault, match="in use by another job: process 77 on h9"):
        Claim(store.url).acquire()
    assert claimed(store)["id"] == "another"


@pytest.mark.parametrize(("host", "waits"), [("h9", 1), (socket.gethostname(), 0)])
def test_a_job_that_gives_no_sign_of_life_is_succeeded_at_once_if_it_ended_on_this_host(
    store, monkeypatch, host, waits
):
    monkeypatch.setattr(claim, "FRESH_SECONDS", 0.1)
    put(store, host=host)
    own = Claim(store.url, (notes := []).append)
    own.acquire(ended="another")
    assert claimed(store)["id"] == own.id
    assert len(notes) == waits


def test_of_two_that_claim_at_once_the_last_has_it(store, monkeypatch):
    monkeypatch.setattr(claim.time, "sleep", lambda seconds: put(store))
    with pytest.raises(EnvironmentFault, match="in use by another job: process 77 on h9"):
        Claim(store.url).acquire()
    assert claimed(store)["id"] == "another"


def test_a_claim_that_was_taken_over_is_lost(store):
    own = Claim(store.url)
    own.acquire()
    put(store)
    for call in (own.update, own.check, own.release):
        with pytest.raises(StoreError, match="taken over"):
            call()
    assert "taken over by another job: process 77 on h9" in own.lost
    assert claimed(store)["id"] == "another"
