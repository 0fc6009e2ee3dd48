"""A run directory in an object store that goes away for good, that others use, or while Ctrl-C is pressed."""

import json
import os
import signal
from dataclasses import dataclass

import pytest
from support.jobs import Result
from support.stored_jobs import (
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
)

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
