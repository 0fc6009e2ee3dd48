"""Elastic jobs whose workers are killed at exact places, come and go: nothing is lost. The drill has more."""

import functools
import json
import os
from pathlib import Path

import pytest
from support.elastic_jobs import TASKS, ElasticJob, check_nothing_lost
from support.jobs import LIMIT_SECONDS, run, temporary_folder, train


@functools.cache
def undisturbed(framework: str) -> Path:
    """Give the run directory of a job of one worker that nothing happened to."""
    options = ("--framework", framework, "--task", f"{TASKS}:Steady")
    return train(1, "none", *options, cwd=temporary_folder(), HVDTRAIN_TEST_STEP_SECONDS="0").folder


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
def test_workers_are_killed_at_exact_places_until_one_is_left(places, tmp_path):
    points = KILLED_IN_A_ROW[places]
    with ElasticJob("torch", tmp_path, workers=4, HVDTRAIN_TEST_POINTS=points) as job:
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 0, result.output[-4000:]
    check_reached(tmp_path, points)
    check_nothing_lost(tmp_path / "run", undisturbed("torch"))


def test_workers_killed_in_an_evaluation_and_in_the_change_after_it_are_replaced(tmp_path):
    points = "evaluating@1#2!9,entering@0#2!9"
    held = {"HVDTRAIN_TEST_HELD_AT": "entering-0"}  # the last worker does not end the job before others come
    with ElasticJob("tf", tmp_path, workers=3, HVDTRAIN_TEST_POINTS=points, **held) as job:
        job.until((tmp_path / "reached-entering-0").exists)
        job.wait_for_workers(3)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 0, result.output[-4000:]
    check_reached(tmp_path, points)
    check_nothing_lost(tmp_path / "run", undisturbed("tf"))


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


def test_workers_come_and_go_through_the_script(tmp_path):
    hosts, slow = script_of(tmp_path, 1), {"HVDTRAIN_TEST_STEP_SECONDS": "0.05"}
    with ElasticJob("torch", tmp_path, workers=1, least=1, most=3, hosts=hosts, **slow) as job:
        job.wait_for_step(2)
        for count in (3, 1, 2):
            set_slots(tmp_path, count)
            job.wait_for_workers(count)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 0, result.output[-4000:]
    check_nothing_lost(tmp_path / "run", undisturbed("torch"))


def test_below_min_np_the_rest_waits_then_saves(tmp_path):
    hosts, launch = script_of(tmp_path, 2), ("--elastic-timeout", "2")
    with ElasticJob("torch", tmp_path, workers=2, least=2, hosts=hosts, launch=launch) as job:
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
