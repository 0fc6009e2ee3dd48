"""Elastic jobs with the real driver and real processes that are really killed; only Horovod is not there."""

import os
import signal

import pytest
from support.elastic import ToyJob
from support.toy_worker import BATCH, value_at

from hvdtrain.elastic.cluster import Limits


def limits(wanted=2, least=1, most=None, **more):
    return Limits(wanted, least, most or wanted, cooldown_seconds=(0.1, 0.5), **more)


def assert_whole(job):
    """Check that each step is in the log once, with each of its positions once."""
    rows = job.rows()
    assert [row[0] for row in rows] == list(range(1, job.steps + 1))
    for step, added, _ in rows:
        assert added == sum(map(value_at, range((step - 1) * BATCH, step * BATCH)))


def kill(job, rank, number=signal.SIGKILL):
    member = next(one for one in job.members() if one["rank"] == rank)
    os.kill(member["pid"], number)
    return member


def test_an_undisturbed_job(tmp_path):
    with ToyJob(tmp_path, limits(3), [("h1", 2), ("h2", 1)]) as job:
        assert job.ended() == (0, "", "")
    assert_whole(job)
    assert job.cluster.said == ["training with 3 workers (world 1)"]
    assert job.state()["members"] == []


@pytest.mark.parametrize("rank", [0, 2])
def test_a_killed_worker_is_replaced_and_nothing_is_lost(tmp_path, rank):
    with ToyJob(tmp_path, limits(3), [("h1", 3)], 400) as job:
        job.trains(3, 10)
        kill(job, rank)
        job.until(lambda job: job.state()["generation"] > 1)
        job.trains(3)
        assert job.ended().exit_code == 0
    assert_whole(job)
    assert any(f"left: rank {rank} on h1: killed (SIGKILL)" in text for text in job.cluster.said)
