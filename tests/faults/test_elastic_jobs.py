"""Elastic jobs whose workers are killed at exact places, come and go: nothing is lost. The drill has more."""

import json
import os
from pathlib import Path

import pytest
from support.elastic_jobs import TASKS, ElasticJob, check_nothing_lost
from support.jobs import FRAMEWORKS, LIMIT_SECONDS, run, train


@pytest.fixture(scope="module", params=FRAMEWORKS)
def undisturbed(request, tmp_path_factory) -> tuple[str, Path]:
    """Give the framework and the run directory of a job of one worker that nothing happened to."""
    folder, task = tmp_path_factory.mktemp(f"undisturbed-{request.param}"), f"{TASKS}:Steady"
    options = ("--framework", request.param, "--task", task)
    return request.param, train(1, "none", *options, cwd=folder, HVDTRAIN_TEST_STEP_SECONDS="0").folder


def check_reached(folder: Path, points: str) -> None:
    """Check that a job was disturbed at all of these places."""
    expected = {"reached-{}-{}".format(*point.partition("#")[0].split("@")) for point in points.split(",")}
    assert {path.name for path in folder.glob("reached-*")} == expected


# one after the other, until one worker is left
KILLED_IN_A_ROW = {
    "step-evaluation-save": "stepping@1#30!9,evaluating@0#2!9,saving@0#3!9",
    "step-entered-write": "stepping@2#33!9,entered@0#2!9,writing@0#3!9",
}


@pytest.mark.parametrize("places", KILLED_IN_A_ROW)
@pytest.mark.parametrize("undisturbed", ["torch"], indirect=True)
def test_workers_are_killed_at_exact_places_until_one_is_left(undisturbed, places, tmp_path):
    framework, expected = undisturbed
    points = KILLED_IN_A_ROW[places]
    with ElasticJob(framework, tmp_path, workers=4, HVDTRAIN_TEST_POINTS=points) as job:
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 0, result.output[-4000:]
    check_reached(tmp_path, points)
    check_nothing_lost(tmp_path / "run", expected)


@pytest.mark.parametrize("undisturbed", ["tf"], indirect=True)
def test_workers_killed_in_an_evaluation_and_in_the_change_after_it_are_replaced(undisturbed, tmp_path):
    framework, expected = undisturbed
    points = "evaluating@1#2!9,entering@0#2!9"
    held = {"HVDTRAIN_TEST_HELD_AT": "entering-0"}  # the last worker does not end the job before others come
    with ElasticJob(framework, tmp_path, workers=3, HVDTRAIN_TEST_POINTS=points, **held) as job:
        job.until((tmp_path / "reached-entering-0").exists)
        job.wait_for_workers(3)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 0, result.output[-4000:]
    check_reached(tmp_path, points)
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


@pytest.mark.parametrize("undisturbed", ["torch"], indirect=True)
def test_workers_come_and_go_through_the_script(undisturbed, tmp_path):
    framework, expected = undisturbed
    hosts, slow = script_of(tmp_path, 1), {"HVDTRAIN_TEST_STEP_SECONDS": "0.05"}
    with ElasticJob(framework, tmp_path, workers=1, least=1, most=3, hosts=hosts, **slow) as job:
        job.wait_for_step(2)
        for count in (3, 1, 2):
            set_slots(tmp_path, count)
            job.wait_for_workers(count)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 0, result.output[-4000:]
    check_nothing_lost(tmp_path / "run", expected)


@pytest.mark.parametrize("undisturbed", ["torch"], indirect=True)
def test_below_min_np_the_rest_waits_then_saves(undisturbed, tmp_path):
    framework, _ = undisturbed
    hosts, launch = script_of(tmp_path, 2), ("--elastic-timeout", "2")
    with ElasticJob(framework, tmp_path, workers=2, least=2, hosts=hosts, launch=launch) as job:
        job.hold()
        job.wait_for_step(2)
        step = job.step()
        set_slots(tmp_path, 1)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 75, result.output[-4000:]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["steps"] >= step
    assert summary["error"].startswith("only 1 worker was left of at least 2 (--min-np) for 2 s")
    assert "elastic: at least 2, at most 2" in result.output
    assert "Continue with --resume when there are slots for 2 workers or more" in result.output


def test_elastic_over_mpi_is_refused_in_words(tmp_path):
    command = ["horovodrun", "--mpi", "-np", "2", "--min-np", "1", "-H", "localhost:2", "true"]
    result = run(command, tmp_path)
    assert result.returncode != 0
    assert "elastic jobs communicate over Gloo" in result.output
