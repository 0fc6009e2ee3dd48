"""A run directory in an object store that goes away for good, that others use, or while Ctrl-C is pressed."""

import json
import os
import re
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.jobs import Result
from support.stored_jobs import (
    CLAIM,
    LONG,
    STEPS,
    Host,
    Saved,
    await_in,
    await_saved,
    ended,
    in_one_line,
    metrics_in,
    reference,
    resumed_from,
    train,
    trained,
    until_gone,
)

IN_TERMINAL = Path(__file__).with_name("in_terminal.py")


# --- a store that takes no checkpoint any more, though it takes all else


@dataclass(frozen=True)
class Cut:
    """A job whose store was full, which SIGTERM ended while it waited, and the same command when it was not.

    Args:
        host: where it ran.
        first: how it ended.
        summary, logged: what summary.json and the last line of metrics.jsonl of its copy said.
        saved: the checkpoints that were in the store then.
        again: how the second one ended.
    """

    host: Host
    first: Result
    summary: dict
    logged: dict
    saved: dict[int, Saved]
    again: Result


@pytest.fixture(scope="module")
def cut_off(store, bucket) -> Cut:
    prefix, host = "cut-off", Host(store.environ)
    command = train("--resume", run_dir=store.url(prefix))
    host.hold_at(7)
    with host.start(command) as job:
        await_saved(job, bucket, prefix, lambda saved: 5 in saved)
        store.proxy.refused = b"/checkpoints/"
        host.release()
        await_in(job, lambda: "uploading to" in job.result().output)
        os.kill(job.process.pid, signal.SIGTERM)  # from then on it waits for 30 s in place of 60 s
        first = ended(job, returncode=3, timeout=50)
    store.proxy.heal()
    saved = bucket.saved(prefix)
    (log,) = host.folder.glob("cache/runs/**/metrics.jsonl")
    summary, logged = json.loads(log.with_name("summary.json").read_text()), metrics_in(log.read_bytes())[-1]
    return Cut(host, first, summary, logged, saved, host.run(command))


def test_a_last_state_that_is_not_in_the_store_is_no_success(cut_off):
    text = in_one_line(cut_off.first)
    assert str(cut_off.host.folder / "cache") in text  # the local copy
    assert "--resume" in text
    assert "QuotaExceeded" in text
    assert "Traceback" not in text


def test_its_summary_says_so_and_is_without_the_wait_for_the_store(cut_off):
    assert cut_off.summary["status"] == "unsaved"
    assert "QuotaExceeded" in cut_off.summary["save_error"]
    assert cut_off.summary["seconds"] < cut_off.logged["seconds"] + 10.0


def test_a_store_that_is_full_keeps_its_checkpoints(cut_off):
    assert sorted(cut_off.saved) == [5]
    assert reference().has_all(cut_off.saved)


def test_the_same_command_uploads_what_is_missing(cut_off, bucket):
    assert resumed_from(cut_off.again) == STEPS
    saved = bucket.saved("cut-off")
    assert sorted(saved) == [20, 25, 30]
    assert reference().has_all(saved)
    assert trained(bucket.metrics("cut-off"), STEPS) == reference().logged(STEPS)


# --- what others wrote


FOREIGN = {
    "notes.txt": b"mine",
    "checkpoints/readme.txt": b"mine",
    "checkpoints/step-00000003/model.safetensors": b"mine",
    "checkpoints/mine/trainer.json": b"mine",
}


@dataclass(frozen=True)
class Shared:
    """A run that was resumed from another one, in a folder with objects of others.

    Args:
        source: what is at the other run's URL before and after.
        foreign: the objects of others that are still there.
        refused: a job that was to begin a run there.
        unchanged: whether that job changed nothing.
        damaged: a job that resumed the run, whose newest checkpoint was damaged.
    """

    source: tuple[dict[str, str], dict[str, str]]
    foreign: dict[str, bytes]
    refused: Result
    unchanged: bool
    damaged: Result


@pytest.fixture(scope="module")
def shared(store, bucket) -> Shared:
    host = Host(store.environ)
    url, source = store.url("shared"), store.url("source")
    host.run(train(run_dir=source, steps=15))
    before = bucket.objects("source")
    bucket.write("shared/notes.txt", FOREIGN["notes.txt"])
    keep = ("--keep-last", "2")
    host.run(train("--resume", source, *keep, run_dir=url))
    for name, content in FOREIGN.items():
        bucket.write(f"shared/{name}", content)
    bucket.copy("source/checkpoints/step-00000005", "shared/checkpoints/step-00000005")
    contents = without_claim(bucket.objects("shared"))
    with host.start(train(run_dir=url)) as job:
        result = job.wait(120)
    unchanged = without_claim(bucket.objects("shared")) == contents
    newest = "shared/checkpoints/step-00000030/model.safetensors"
    bucket.write(newest, bucket.read(newest)[:-1])
    damaged = Host(store.environ).run(train("--resume", *keep, run_dir=url, steps=LONG))
    foreign = {name: bucket.read(f"shared/{name}") for name in FOREIGN}
    return Shared((before, bucket.objects("source")), foreign, result, unchanged, damaged)


def without_claim(objects: dict[str, str]) -> dict[str, str]:
    """Return objects without the claim, which each job writes before it looks."""
    return {name: tag for name, tag in objects.items() if name != CLAIM}


def test_a_run_that_was_resumed_from_is_not_changed(shared):
    assert shared.source[0] == shared.source[1]


def test_objects_of_others_are_not_changed(shared):
    assert shared.foreign == FOREIGN


def test_a_checkpoint_that_another_run_wrote_is_not_deleted(shared, bucket):
    assert 5 in bucket.saved("shared")


def test_a_new_run_is_not_written_over_another_one(shared):
    assert shared.refused.returncode in (2, 3)
    assert "Traceback" not in shared.refused.output
    assert shared.unchanged


def test_a_damaged_checkpoint_in_the_store_is_passed_over(shared, bucket):
    assert resumed_from(shared.damaged) == 25
    assert "damaged" in in_one_line(shared.damaged)
    saved = bucket.saved("shared")
    assert sorted(saved)[-2:] == [35, 40]
    assert reference().has_all(saved)
    expected = [line for line in reference().logged(LONG) if line["step"] > 15]
    assert trained(bucket.metrics("shared"), LONG) == expected  # the lines before are the source's


# --- Ctrl-C while a checkpoint is uploaded


@dataclass(frozen=True)
class Interrupted:
    """A job that was interrupted during a slow upload.

    Args:
        host: where it ran.
        result: how it ended.
        seconds: how long that took.
    """

    host: Host
    result: Result
    seconds: float


@pytest.fixture(scope="module")
def interrupted(store, bucket) -> Interrupted:
    host = Host(store.environ)
    command = train("--set", "task_options.hidden=100000", run_dir=store.url("interrupted"))
    host.hold_at(7)
    with host.start([sys.executable, str(IN_TERMINAL), *command]) as job:
        await_saved(job, bucket, "interrupted", lambda saved: 5 in saved)
        host.hold_at(12)  # step 5 has been read back, too, when that of step 10 is there
        await_saved(job, bucket, "interrupted", lambda saved: 10 in saved)
        store.proxy.delay_seconds = 2.0
        host.hold_at(17)
        await_in(job, lambda: host.reached() >= 17)
        begun = time.monotonic()
        os.kill(job.process.pid, signal.SIGUSR1)
        result = until_gone(job)
        seconds = time.monotonic() - begun
    store.proxy.heal()
    return Interrupted(host, result, seconds)


def test_ctrl_c_during_an_upload_ends_soon(interrupted):
    assert interrupted.result.returncode == 130
    assert interrupted.seconds < 60


def test_ctrl_c_says_what_is_saved(interrupted, store):
    text = in_one_line(interrupted.result)
    assert re.search(store.url("interrupted", "checkpoints", "step-000000(05|10|15)"), text)
    assert str(interrupted.host.folder / "cache") in text  # where the rest is
    assert "--resume" in text
    assert "Traceback" not in text


def test_ctrl_c_leaves_whole_checkpoints(interrupted, bucket):
    assert {5, 10} <= bucket.saved("interrupted").keys()
