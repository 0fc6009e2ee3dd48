"""Jobs whose run directory lies in an object store: killed, stopped, with a store that fails or is full."""

import json
import os
import re
import signal

import pytest
from support import stored_jobs
from support.jobs import temporary_folder
from support.stored_jobs import (
    CLAIM,
    STEPS,
    Host,
    Local,
    ended,
    in_one_line,
    kill_rank_zero,
    local,
    metrics_at,
    reference,
    resumed_from,
    saved_at,
    summary_at,
    train,
)
from support.stored_tasks import DATA, PARTS
from support.stream_files import write_samples

pytest.importorskip("pyarrow")


def test_a_run_that_was_killed_is_resumed_on_another_host_from_the_store_alone(store):
    """Rank 0 is killed when the first file of a checkpoint is in the store."""
    write_samples(data := temporary_folder(), PARTS)
    store.put_folder(data, "data")

    def command(run_dir: str, *options: str) -> list[str]:
        options = ("--steps", str(STEPS), *options)
        return stored_jobs.command_for(2, "gloo", "torch", "Parquet", *options, run_dir=run_dir)

    prefix, host = "killed", Host(**store.environ)
    expected = local(command("run"), **{DATA: str(data)})
    host.hold_at(12)
    with host.start(command(store.url(prefix)), **{DATA: store.url("data")}) as job:
        job.until(lambda: 10 in saved_at(store, prefix))
        host.hold_at(17)
        job.until(lambda: store.objects(f"{prefix}/checkpoints/step-00000015/"))
        store.proxy.is_frozen = True
        kill_rank_zero(job)
    store.proxy.heal()
    store.remove(f"{prefix}/{CLAIM}")  # in place of waiting until it is too old
    before = saved_at(store, prefix)
    assert 10 in before
    assert expected.has_all(before)

    command = command(store.url(prefix), "--resume")
    resumed = Host(**store.environ).run(command, **{DATA: store.url("data")})
    assert resumed_from(resumed) == max(before)
    assert metrics_at(store, prefix) == expected.metrics
    saved = saved_at(store, prefix)
    assert sorted(saved) == [20, 25, 30]
    assert expected.has_all(saved)
    url = store.url(prefix, "checkpoints", "step-00000030")
    assert summary_at(store, prefix)["checkpoint"] == url
    assert f"checkpoint: {url}" in in_one_line(resumed)


def test_training_continues_while_the_store_is_down_and_nothing_is_lost(store):
    """It answers with errors, then slowly, then not at all, then again."""
    prefix, host, proxy = "weathered", Host(**store.environ), store.proxy
    host.hold_at(7)
    with host.start(train(run_dir=store.url(prefix))) as job:
        job.until(lambda: 5 in saved_at(store, prefix))
        proxy.failures_left = 6
        host.hold_at(12)
        job.until(lambda: 10 in saved_at(store, prefix))
        proxy.heal()
        proxy.delay_seconds = 0.1
        host.hold_at(17)
        job.until(lambda: 15 in saved_at(store, prefix))
        proxy.heal()
        proxy.is_down = True
        before = saved_at(store, prefix)
        host.hold_at(27)
        job.until(lambda: host.reached() >= 27)
        job.until(lambda: re.search(r"(?i)store|cannot be", job.result().output))
        during = saved_at(store, prefix)
        proxy.heal()
        host.release()
        result = ended(job)
    after = saved_at(store, prefix)
    assert 15 in before
    assert {**during, **before} == during
    assert sorted(after) == [20, 25, 30]
    assert all(reference().has_all(found) for found in (before, after))
    assert Local({}, metrics_at(store, prefix)).logged(STEPS) == reference().logged(STEPS)
    assert summary_at(store, prefix)["status"] == "completed"
    assert "Traceback" not in result.output


@pytest.mark.parametrize("place", ["down", "missing"])
def test_without_a_store_a_job_does_not_begin(place, store):
    url = "s3://no-such-bucket/run" if place == "missing" else store.url("down")
    store.proxy.is_down = place == "down"
    try:
        result = Host(**store.environ).run(train(run_dir=url), returncode=3)
    finally:
        store.proxy.heal()
    assert url.rpartition("/")[0] in in_one_line(result)
    assert "Traceback" not in result.output
    assert "train step" not in in_one_line(result)


def test_a_last_state_that_is_not_in_the_store_is_no_success_and_is_uploaded_later(store):
    """SIGTERM ends the job while it waits for the store, which takes no checkpoint; then it is resumed."""
    prefix, host = "cut-off", Host(**store.environ)
    command = train("--resume", run_dir=store.url(prefix))
    host.hold_at(7)
    with host.start(command) as job:
        job.until(lambda: 5 in saved_at(store, prefix))
        store.proxy.refused = "/checkpoints/"
        host.release()
        job.until(lambda: "uploading to" in job.result().output)
        os.kill(job.process.pid, signal.SIGTERM)  # from then on it waits for 30 s in place of 60 s
        text = in_one_line(ended(job, returncode=3, timeout=50))
    store.proxy.heal()
    assert str(host.folder / "cache") in text  # the local copy
    assert "--resume" in text
    assert "QuotaExceeded" in text
    assert "Traceback" not in text
    (log,) = host.folder.glob("cache/runs/**/metrics.jsonl")
    summary, last = (
        json.loads(log.with_name("summary.json").read_text()),
        json.loads(log.read_text().splitlines()[-1]),
    )
    assert summary["status"] == "unsaved"
    assert "QuotaExceeded" in summary["save_error"]
    assert summary["seconds"] < last["seconds"] + 10.0, "without the wait for the store"
    saved = saved_at(store, prefix)
    assert sorted(saved) == [5]
    assert reference().has_all(saved)

    assert resumed_from(host.run(command)) == STEPS
    saved = saved_at(store, prefix)
    assert sorted(saved) == [20, 25, 30]
    assert reference().has_all(saved)
    assert Local({}, metrics_at(store, prefix)).logged(STEPS) == reference().logged(STEPS)
