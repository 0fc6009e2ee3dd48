"""Two jobs and one run directory in an object store: one of them writes, and says so."""

import os
import re
import signal
import time
from dataclasses import dataclass

import pytest
from support.jobs import Result, started
from support.stored_jobs import Host, await_saved, command_for, in_one_line, resumed_from, until_gone

STEPS = 30
TAKE_OVER_SECONDS = 240  # at most: the claim counts as fresh for 60 s


@dataclass(frozen=True)
class Met:
    """What came of jobs that met in one run directory.

    Args:
        refused: the second job, while the first one was training.
        unchanged: whether all checkpoints that were there before it are there as they were.
        successor: the third job, which came when the first one was frozen.
        seconds: how long it took to its end.
        objects: what was in the run directory then, and when the first one had gone on and ended.
        first: how the first one ended.
    """

    refused: Result
    unchanged: bool
    successor: Result
    seconds: float
    objects: tuple[dict[str, str], dict[str, str]]
    first: Result


@pytest.fixture(scope="module")
def met(store, bucket) -> Met:
    options = ("--steps", str(STEPS), "--resume")
    command = command_for(1, "none", "torch", "Stored", *options, run_dir=store.url("run"))
    hosts = [Host(store.environ) for _ in range(3)]
    hosts[0].hold_at(12)
    with hosts[0].start(command) as job:
        await_saved(job, bucket, "run", lambda saved: 10 in saved)
        before = bucket.saved("run")
        refused = hosts[1].run(command, returncode=3)
        found = bucket.saved("run")
        unchanged = {**found, **before} == found
        signal_all(job, signal.SIGSTOP)
        began = time.monotonic()
        successor = hosts[2].run(command, timeout=TAKE_OVER_SECONDS)
        seconds = time.monotonic() - began
        after = bucket.objects("run")
        signal_all(job, signal.SIGCONT)
        hosts[0].release()
        first = until_gone(job)
    return Met(refused, unchanged, successor, seconds, (after, bucket.objects("run")), first)


def signal_all(job: started, number: int) -> None:
    for pid in job.pids():
        os.kill(pid, number)


def test_a_second_job_is_refused_and_told_of_the_first(met):
    text = in_one_line(met.refused)
    assert re.search(rf"in use by another job: process \d+ on {os.uname().nodename}", text)
    assert "Traceback" not in text
    assert "train step" not in text


def test_a_second_job_changes_nothing(met):
    assert met.unchanged


def test_a_job_takes_over_from_one_that_gives_no_sign_of_life(met, bucket):
    assert resumed_from(met.successor) == 10
    assert met.seconds < TAKE_OVER_SECONDS
    assert sorted(bucket.saved("run")) == [20, 25, 30]
    assert bucket.summary("run")["status"] == "completed"


def test_a_job_that_was_taken_over_from_changes_nothing(met):
    assert met.objects[0] == met.objects[1]


def test_a_job_that_was_taken_over_from_ends_with_an_error(met):
    assert met.first.returncode == 3
    assert "another job" in in_one_line(met.first)
    assert "Traceback" not in met.first.output
