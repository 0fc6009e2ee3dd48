"""Elastic jobs: workers are killed, frozen, come and leave; nothing is lost and training goes on."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.elastic_jobs import ElasticJob, check_nothing_lost, events
from support.jobs import FRAMEWORKS, run

SPARE_SECONDS = 15


@pytest.fixture(scope="module", params=FRAMEWORKS)
def undisturbed(request, tmp_path_factory) -> tuple[str, Path]:
    """Give the framework and the run directory of a job that nothing happened to."""
    folder = tmp_path_factory.mktemp(f"undisturbed-{request.param}")
    with ElasticJob(request.param, folder, workers=2, HVDTRAIN_TEST_STEP_SECONDS="0") as job:
        result = job.wait(120)
    assert result.returncode == 0, result.output[-4000:]
    return request.param, folder / "run"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_costs_nothing_but_seconds(undisturbed, rank, tmp_path):
    framework, expected = undisturbed
    with ElasticJob(framework, tmp_path, workers=3) as job:
        job.wait_for_step(30)
        job.send(rank)
        result = job.wait(120)
    assert result.returncode == 0, result.output[-4000:]
    check_nothing_lost(tmp_path / "run", expected)
    first = events(tmp_path / "run")[0]
    assert any("killed" in left or "SIGKILL" in left for left in first["left"]), first


@pytest.mark.parametrize(
    "point",
    [
        "stepping@1#40!9",
        "evaluating@0#2!9",
        "saving@0#2!9",
        "writing@0#2!9",
        "evaluating@1#2!9,entering@1#2!9",
        "stepping@0#33!9,syncing@0#2!9",
    ],
)
def test_a_worker_killed_at_an_exact_place(undisturbed, point, tmp_path):
    framework, expected = undisturbed
    with ElasticJob(framework, tmp_path, workers=3, HVDTRAIN_TEST_POINTS=point) as job:
        result = job.wait(150)
    assert result.returncode == 0, result.output[-4000:]
    assert len(list(tmp_path.glob("reached-*"))) == len(point.split(",")), "the places were reached"
    check_nothing_lost(tmp_path / "run", expected)


def test_workers_come_and_go_through_the_script(undisturbed, tmp_path):
    framework, expected = undisturbed
    slots, script = tmp_path / "slots", tmp_path / "hosts.sh"
    slots.write_text("1")
    script.write_text('#!/bin/sh\necho "localhost:$(cat slots)"\n')
    script.chmod(0o755)
    hosts = ("--host-discovery-script", "./hosts.sh")
    slow = {"HVDTRAIN_TEST_STEP_SECONDS": "0.15"}
    with ElasticJob(framework, tmp_path, workers=1, least=1, most=4, hosts=hosts, **slow) as job:
        for count in (2, 4, 1, 3):
            step = job.step()
            job.wait_for_step(step + 5)
            slots.with_suffix(".new").write_text(str(count))
            os.replace(slots.with_suffix(".new"), slots)
            job.wait_for_workers(count)
        result = job.wait(150)
    assert result.returncode == 0, result.output[-4000:]
    check_nothing_lost(tmp_path / "run", expected)


def test_a_frozen_worker_is_left_out_and_does_not_come_back_as_itself(undisturbed, tmp_path):
    framework, expected = undisturbed
    with ElasticJob(framework, tmp_path, "--stall-timeout", "4", workers=3) as job:
        job.wait_for_step(30)
        pid = job.send(1, signal.SIGSTOP)
        stopped, step = time.monotonic(), job.step()
        job.wait_for_step(step + 3)
        assert time.monotonic() - stopped < 4 + SPARE_SECONDS
        assert not Path(f"/proc/{pid}").exists() or pid not in job.members().values()
        result = job.wait(120)
    assert result.returncode == 0, result.output[-4000:]
    check_nothing_lost(tmp_path / "run", expected)


def test_sigterm_to_one_worker_means_that_it_leaves(undisturbed, tmp_path):
    framework, expected = undisturbed
    with ElasticJob(framework, tmp_path, workers=2, least=1) as job:
        job.wait_for_step(30)
        job.send(0, signal.SIGTERM)
        result = job.wait(120)
    assert result.returncode == 0, result.output[-4000:]
    check_nothing_lost(tmp_path / "run", expected)
    assert "SIGTERM" in str(events(tmp_path / "run")[0]["left"])


def test_sigterm_to_the_launcher_stops_all_and_the_run_continues(undisturbed, tmp_path):
    framework, expected = undisturbed
    with ElasticJob(framework, tmp_path, workers=2) as job:
        job.wait_for_step(30)
        job.process.send_signal(signal.SIGTERM)
        result = job.wait(60)
    assert result.returncode == 75, result.output[-4000:]
    with ElasticJob(framework, tmp_path, "--resume", workers=3) as job:
        result = job.wait(120)
    assert result.returncode == 0, result.output[-4000:]
    check_nothing_lost(tmp_path / "run", expected)


def test_below_min_np_the_rest_waits_then_saves(undisturbed, tmp_path):
    framework, _ = undisturbed
    launch = ("--elastic-timeout", "5", "--blacklist-cooldown-range", "60", "60")
    with ElasticJob(
        framework, tmp_path, workers=2, least=2, hosts=("-H", "localhost:2"), launch=launch
    ) as job:
        job.wait_for_step(30)
        step = job.step()
        job.send(1)
        result = job.wait(60)
    assert result.returncode == 75, result.output[-4000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["steps"] >= step


def test_elastic_over_mpi_is_refused_in_words(tmp_path):
    command = ["horovodrun", "--mpi", "-np", "2", "--min-np", "1", "-H", "localhost:2", "true"]
    result = run(command, tmp_path, timeout=60)
    assert result.returncode != 0
    assert "elastic jobs communicate over Gloo" in result.output
