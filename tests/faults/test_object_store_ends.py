"""A run directory in an object store that goes away for good, that others use, or while Ctrl-C is pressed."""

import json
import os
import signal

from support.stored_jobs import (
    STEPS,
    Host,
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


def test_a_last_state_that_is_not_in_the_store_is_no_success_and_is_uploaded_later(store, bucket):
    """SIGTERM ends the job while it waits for the store, which takes no checkpoint; then it is resumed."""
    prefix, host = "cut-off", Host(store.environ)
    command = train("--resume", run_dir=store.url(prefix))
    host.hold_at(7)
    with host.start(command) as job:
        await_saved(job, bucket, prefix, lambda saved: 5 in saved)
        store.proxy.refused = b"/checkpoints/"
        host.release()
        await_in(job, lambda: "uploading to" in job.result().output)
        os.kill(job.process.pid, signal.SIGTERM)  # from then on it waits for 30 s in place of 60 s
        text = in_one_line(ended(job, returncode=3, timeout=50))
    store.proxy.heal()
    assert str(host.folder / "cache") in text  # the local copy
    assert "--resume" in text
    assert "QuotaExceeded" in text
    assert "Traceback" not in text
    (log,) = host.folder.glob("cache/runs/**/metrics.jsonl")
    summary, logged = json.loads(log.with_name("summary.json").read_text()), metrics_in(log.read_bytes())[-1]
    assert summary["status"] == "unsaved"
    assert "QuotaExceeded" in summary["save_error"]
    assert summary["seconds"] < logged["seconds"] + 10.0, "without the wait for the store"
    saved = bucket.saved(prefix)
    assert sorted(saved) == [5]
    assert reference().has_all(saved)

    assert resumed_from(host.run(command)) == STEPS
    saved = bucket.saved(prefix)
    assert sorted(saved) == [20, 25, 30]
    assert reference().has_all(saved)
    assert trained(bucket.metrics(prefix), STEPS) == reference().logged(STEPS)
