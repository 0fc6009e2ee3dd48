"""Jobs whose run directory lies in an object store: killed, without a store, beside objects of others."""

import re
from dataclasses import dataclass

import pytest
from support import stored_jobs
from support.jobs import Result, temporary_folder
from support.stored_jobs import (
    CLAIM,
    STEPS,
    Host,
    Local,
    Saved,
    await_in,
    await_saved,
    ended,
    in_one_line,
    kill_all,
    local,
    logged,
    rank_zero,
    reference,
    resumed_from,
    train,
    trained,
    until_gone,
)
from support.stored_tasks import DATA, PARTS
from support.stream_files import write_samples

pytest.importorskip("pyarrow")

# --- killed in the middle of an upload, resumed from the store alone: with data in the store, too

# framework, launcher, task
CELL = ("torch", "gloo", "Parquet")


@dataclass(frozen=True)
class Killed:
    """A run in the store that was killed, and what is known of it.

    Args:
        prefix: where it lies in the bucket.
        saved: its checkpoints then.
        expected: an uninterrupted run, with data on a disk.
    """

    prefix: str
    saved: dict[int, Saved]
    expected: Local

    def command(self, framework: str, run_dir: str, *options: str) -> list[str]:
        _, controller, task = CELL
        options = ("--steps", str(STEPS), *options)
        return stored_jobs.command_for(2, controller, framework, task, *options, run_dir=run_dir)


@pytest.fixture(scope="module")
def killed(store, bucket) -> Killed:
    """Kill rank 0 when the first file of a checkpoint is in the store."""
    framework = CELL[0]
    write_samples(data := temporary_folder(), PARTS)
    store.put_folder(data, f"data-{framework}")
    prefix, host = f"killed-{framework}", Host(store.environ)
    run = Killed(prefix, {}, Local({}, []))
    expected = local(run.command(framework, "run"), **{DATA: str(data)})
    command = run.command(framework, store.url(prefix))
    host.hold_at(12)
    with host.start(command, **{DATA: store.url(f"data-{framework}")}) as job:
        await_saved(job, bucket, prefix, lambda saved: 10 in saved)
        host.hold_at(17)
        await_in(job, lambda: any("step-00000015/" in name for name in bucket.objects(prefix)))
        store.proxy.is_frozen = True
        kill_all(rank_zero(job))
        returncode = until_gone(job).returncode
    store.proxy.heal()
    assert returncode != 0
    bucket.remove(f"{prefix}/{CLAIM}")  # in place of waiting until it is too old
    return Killed(prefix, bucket.saved(prefix), expected)


@pytest.fixture(scope="module")
def resumed(killed, store) -> Result:
    """Resume on a host that has nothing of the first one."""
    framework = CELL[0]
    command = killed.command(framework, store.url(killed.prefix), "--resume")
    return Host(store.environ).run(command, **{DATA: store.url(f"data-{framework}")})


def test_a_killed_run_has_whole_checkpoints_in_the_store(killed):
    assert 10 in killed.saved
    assert killed.expected.has_all(killed.saved)


def test_another_host_resumes_from_the_newest_one_in_the_store(killed, resumed):
    assert resumed_from(resumed) == max(killed.saved)


def test_all_that_is_logged_is_that_of_an_uninterrupted_run(killed, resumed, bucket):
    assert logged(bucket.metrics(killed.prefix)) == logged(killed.expected.metrics)


def test_the_last_checkpoints_are_those_of_an_uninterrupted_run(killed, resumed, bucket):
    saved = bucket.saved(killed.prefix)
    assert sorted(saved) == [20, 25, 30]
    assert killed.expected.has_all(saved)


def test_the_summary_names_the_checkpoint_in_the_store(killed, resumed, bucket, store):
    url = store.url(killed.prefix, "checkpoints", "step-00000030")
    assert bucket.summary(killed.prefix)["checkpoint"] == url
    assert f"checkpoint: {url}" in in_one_line(resumed)


# --- a store that fails for a while


@dataclass(frozen=True)
class Weathered:
    """A job whose store answered with errors, then slowly, then not at all, then again.

    Args:
        result: how it ended.
        before, during: the checkpoints in the store when it went down, and while training continued.
        after: those at the end.
    """

    result: Result
    before: dict[int, Saved]
    during: dict[int, Saved]
    after: dict[int, Saved]


@pytest.fixture(scope="module")
def weathered(store, bucket) -> Weathered:
    prefix, host, proxy = "weathered", Host(store.environ), store.proxy
    host.hold_at(7)
    with host.start(train(run_dir=store.url(prefix))) as job:
        await_saved(job, bucket, prefix, lambda saved: 5 in saved)
        proxy.failures_left = 6
        host.hold_at(12)
        await_saved(job, bucket, prefix, lambda saved: 10 in saved)
        proxy.heal()
        proxy.delay_seconds = 0.1
        host.hold_at(17)
        await_saved(job, bucket, prefix, lambda saved: 15 in saved)
        proxy.heal()
        proxy.is_down = True
        before = bucket.saved(prefix)
        host.hold_at(27)
        await_in(job, lambda: host.reached() >= 27)
        await_in(job, lambda: re.search(r"(?i)store|cannot be", job.result().output))
        during = bucket.saved(prefix)
        proxy.heal()
        host.release()
        result = ended(job)
    return Weathered(result, before, during, bucket.saved(prefix))


def test_training_continues_while_the_store_is_down(weathered):
    assert 15 in weathered.before
    assert {**weathered.during, **weathered.before} == weathered.during


def test_nothing_is_lost_when_the_store_is_back(weathered, bucket):
    assert sorted(weathered.after) == [20, 25, 30]
    assert all(reference().has_all(found) for found in (weathered.before, weathered.after))
    assert trained(bucket.metrics("weathered"), STEPS) == reference().logged(STEPS)
    assert bucket.summary("weathered")["status"] == "completed"


def test_a_store_that_fails_shows_no_traceback(weathered):
    assert "Traceback" not in weathered.result.output


@pytest.mark.parametrize("place", ["down", "missing"])
def test_without_a_store_a_job_does_not_begin(place, store):
    url = "s3://no-such-bucket/run" if place == "missing" else store.url("down")
    store.proxy.is_down = place == "down"
    try:
        result = Host(store.environ).run(train(run_dir=url), returncode=3)
    finally:
        store.proxy.heal()
    assert url.rpartition("/")[0] in in_one_line(result)
    assert "Traceback" not in result.output
    assert "train step" not in in_one_line(result)
