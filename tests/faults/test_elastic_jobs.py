"""Elastic jobs whose workers are killed at exact places, come and go: nothing is lost. The drill has more."""

import json
import os
from pathlib import Path

import pytest
from support.elastic_jobs import ElasticJob, check_nothing_lost
from support.jobs import FRAMEWORKS, run


@pytest.fixture(scope="module", params=FRAMEWORKS)
def undisturbed(request, tmp_path_factory) -> tuple[str, Path]:
    """Give the framework and the run directory of a job that nothing happened to."""
    folder = tmp_path_factory.mktemp(f"undisturbed-{request.param}")
    with ElasticJob(request.param, folder, workers=2, HVDTRAIN_TEST_STEP_SECONDS="0") as job:
        result = job.wait(120)
    assert result.returncode == 0, result.output[-4000:]
    return request.param, folder / "run"


@pytest.mark.parametrize(
    "points",
    [
        "stepping@1#40!9",
        "evaluating@0#2!9",
        "saving@0#2!9",
        "writing@0#2!9",
        "evaluating@1#2!9,entering@0#2!9",
        "stepping@2#33!9,entered@0#2!9",
    ],
)
def test_a_worker_is_killed_at_an_exact_place(undisturbed, points, tmp_path):
    framework, expected = undisturbed
    with ElasticJob(framework, tmp_path, workers=3, HVDTRAIN_TEST_POINTS=points) as job:
        result = job.wait(200)
    assert result.returncode == 0, result.output[-4000:]
    assert len(list(tmp_path.glob("reached-*"))) == len(points.split(",")), "the places were reached"
    check_nothing_lost(tmp_path / "run", expected)


def script_of(folder: Path, slots: int) -> tuple[str, str]:
    """Give the words for horovodrun that name a discovery script, which shows what is set."""
    set_slots(folder, slots)
    (folder / "hosts.sh").write_text('#!/bin/sh\necho "localhost:$(cat slots)"\n')
    (folder / "hosts.sh").chmod(0o755)
    return ("--host-discovery-script", "./hosts.sh")


def set_slots(folder: Path, slots: int) -> None:
    """Change what the discovery script shows."""
    (folder / "slots.new").write_text(str(slots))
    os.replace(folder / "slots.new", folder / "slots")


def test_workers_come_and_go_through_the_script(undisturbed, tmp_path):
    framework, expected = undisturbed
    hosts, slow = script_of(tmp_path, 1), {"HVDTRAIN_TEST_STEP_SECONDS": "0.3"}
    with ElasticJob(framework, tmp_path, workers=1, least=1, most=4, hosts=hosts, **slow) as job:
        for count in (2, 4, 1, 3):
            job.wait_for_step(job.step() + 5)
            set_slots(tmp_path, count)
            job.wait_for_workers(count)
        result = job.wait(200)
    assert result.returncode == 0, result.output[-4000:]
    check_nothing_lost(tmp_path / "run", expected)


def test_below_min_np_the_rest_waits_then_saves(undisturbed, tmp_path):
    framework, _ = undisturbed
    hosts, launch = script_of(tmp_path, 2), ("--elastic-timeout", "4")
    slow = {"HVDTRAIN_TEST_STEP_SECONDS": "0.1"}
    with ElasticJob(framework, tmp_path, workers=2, least=2, hosts=hosts, launch=launch, **slow) as job:
        job.wait_for_step(30)
        step = job.step()
        set_slots(tmp_path, 1)
        result = job.wait(60)
    assert result.returncode == 75, result.output[-4000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["steps"] >= step
    assert summary["error"].startswith("only 1 worker was left of at least 2 (--min-np) for 4 s")
    assert "elastic: at least 2, at most 2" in result.output
    assert "Continue with --resume when there are slots for 2 workers or more" in result.output


def test_elastic_over_mpi_is_refused_in_words(tmp_path):
    command = ["horovodrun", "--mpi", "-np", "2", "--min-np", "1", "-H", "localhost:2", "true"]
    result = run(command, tmp_path, timeout=60)
    assert result.returncode != 0
    assert "elastic jobs communicate over Gloo" in result.output
