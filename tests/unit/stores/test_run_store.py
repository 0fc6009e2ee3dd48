"""What a run directory at a URL holds at any moment while a working copy is uploaded to it."""

import json
import random
from contextlib import suppress

import pytest
from support.fakes import FakeReport
from support.states import contents, make_record, saved
from support.store_jobs import Job, stored, verified

from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.remote.run_store import RunStore
from hvdtrain.checkpoints.remote.stored_checkpoints import fetch
from hvdtrain.checkpoints.saver import BackgroundSaver
from hvdtrain.errors import ConfigError
from hvdtrain.jobs.run_directory.folder import end_uploads, published
from hvdtrain.storage.urls import StoreError


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
    path = job.folder / "checkpoints" / storage.name_of(50)
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


def save_in(run_store, step):
    config = make_record().config | {"run_dir": run_store.url}
    (run_store.folder / "metrics.jsonl").write_text("{}\n")
    return saved(run_store.folder / "checkpoints", step, config=config)


@pytest.mark.parametrize("is_all_uploaded", [True, False])
def test_what_a_job_writes_is_whole_when_it_was_waited_for_and_its_copy_goes(tmp_path, is_all_uploaded):
    url, folder = f"file://{tmp_path}/store/a run", tmp_path / "copy"
    run_store = RunStore(url, folder)
    run_store.begin(False)
    report = FakeReport()
    saver = BackgroundSaver(folder / "checkpoints", report, store=run_store)
    run_store.start(None)
    path = save_in(run_store, 3)
    if not is_all_uploaded:
        saved(path.parent, 2).rename(path.with_name("set-aside-step-00000002"))
    assert run_store.flush(lambda: (60.0, 120.0), print)
    assert published(saver) == (f"{url}/checkpoints/step-00000003", None)
    end_uploads(saver, report, 60.0)
    said = " ".join(report.notes)
    assert folder.exists() is not is_all_uploaded
    assert ("these are not in the store: checkpoints/set-aside-step-00000002" in said) is not is_all_uploaded
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
    (folder / ".hydra").mkdir()
    (folder / ".hydra" / "config.yaml").write_text("a: 1")
    (folder / "poetry.lock").write_text("")
    (folder / "link").symlink_to(tmp_path, target_is_directory=True)
    report = FakeReport()
    saver = BackgroundSaver(folder / "checkpoints", report, store=job.uploader)
    job.round(is_last=True)
    end_uploads(saver, report, 1.0)
    said = " ".join(report.notes)
    assert folder.is_dir()
    assert all(name in said for name in (".hydra/config.yaml", "poetry.lock", "link"))


def test_a_step_that_is_saved_again_is_uploaded_again(store, tmp_path):
    job = Job(store, tmp_path / "copy")
    job.save(1)
    job.round()
    path = job.save(1, value=9.0)
    assert job.uploader.unfinished() == [path.name]
    job.round()
    assert contents(fetched(store, path, tmp_path / "fetched")) == contents(path)
