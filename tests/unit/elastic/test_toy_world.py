"""Elastic jobs with the real driver and real processes that are really killed; only Horovod is not there."""

import os
import random
import signal
import time
from contextlib import suppress

import pytest
from support.elastic import ToyJob
from support.toy_worker import BATCH, value_at

from hvdtrain.elastic.driver.cluster import Limits


def limits(wanted=2, least=1, most=None, **more):
    return Limits(wanted, least, most or wanted, cooldown_seconds=(0.1, 0.5), **more)


def assert_whole(job):
    """Check that each step is in the log once, with each of its positions once."""
    rows = job.rows()
    assert [row[0] for row in rows] == list(range(1, job.steps + 1))
    for step, added, _ in rows:
        assert added == sum(map(value_at, range((step - 1) * BATCH, step * BATCH)))


def test_sigterm_to_the_launcher_lets_all_save_and_the_job_can_be_continued(tmp_path):
    with ToyJob(tmp_path, limits(2), [("h1", 2)]) as job:
        job.trains(2, 10)
        job.driver.signal(signal.SIGTERM)
        assert (job.ended().exit_code, job.ended().problem) == (75, "")
    assert (tmp_path / "checkpoint").read_text().startswith(f"[{job.step()},")


@pytest.mark.parametrize("seed", [1])
def test_chaos(tmp_path, seed):
    """Kills, freezes, leaves, and hosts that come and go, many a second; nothing is lost, nobody is left."""
    chance = random.Random(seed)
    seconds = float(os.environ.get("HVDTRAIN_CHAOS_SECONDS", "8"))
    environ = {"TOY_STALL": "2", "TOY_STEP": "0.002", "TOY_BEAT": "0.2"}
    with ToyJob(tmp_path, limits(3, most=4), [("h1", 2), ("h2", 2)], **environ) as job:
        job.trains(3)
        until, done = time.monotonic() + seconds, 0
        while time.monotonic() < until:
            time.sleep(chance.uniform(0, 0.8))
            if chance.random() < 0.2:
                job.cluster.now_hosts = [("h1", chance.randint(1, 2)), ("h2", chance.randint(0, 2))]
                continue
            members = job.members("training", "syncing", "entering", "ready", "building", "going")
            if members:
                done += 1
                kind = chance.choices([signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM], [8, 1, 1])[0]
                if kind == signal.SIGTERM:  # if all leave, the job stops
                    members = job.members("training")[2:]
                for one in members and [chance.choice(members)]:
                    with suppress(ProcessLookupError):
                        os.kill(one["pid"], kind)
                    time.sleep(2.5 if kind == signal.SIGTERM else 0)
        job.cluster.now_hosts = [("h1", 2), ("h2", 2)]
        job.until(lambda job: len(job.members()) >= 3, 120)
        assert job.finish().exit_code == 0
    assert job.steps > 100
    assert done > seconds / 4
    assert_whole(job)
