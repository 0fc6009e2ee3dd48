"""The newest checkpoint is damaged: a run says so, sets it aside and goes on from the one before."""

import shutil
from pathlib import Path

import pytest
from support.jobs import temporary_folder
from support.resuming import (
    checkpoint_files,
    command_for,
    content_of,
    killed_at,
    logged,
    resumed_from,
    said,
    trained,
)

JOB = (1, "none", "Dropping", "--framework", "torch", "--steps", "40")  # saves at every fifth


@pytest.fixture(scope="module")
def uninterrupted():
    return trained(*JOB, cwd=temporary_folder())


@pytest.fixture(scope="module")
def killed():
    """Train, kill the run in the middle, and give its directory."""
    folder = temporary_folder()
    killed_at(22, command_for(*JOB), folder, 0.005)
    return folder / "run"


def flip_a_byte_of_the_optimizer(checkpoint: Path) -> str:
    path = checkpoint / "optimizer.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)
    return "the content of optimizer.safetensors has changed"


def copied(killed: Path) -> Path:
    """Give a folder with a copy of the run that was killed."""
    folder = temporary_folder()
    shutil.copytree(killed, folder / "run")
    return folder


def checkpoints_of(folder: Path) -> list[Path]:
    return sorted((folder / "run" / "checkpoints").glob("step-*"))


def test_a_damaged_checkpoint_is_set_aside_and_the_run_goes_on_from_the_one_before(killed, uninterrupted):
    folder = copied(killed)
    before, newest = checkpoints_of(folder)[-2:]
    problem, content = flip_a_byte_of_the_optimizer(newest), content_of(newest)
    run = trained(*JOB, "--resume", cwd=folder)
    assert f"checkpoint run/checkpoints/{newest.name} is damaged: {problem}; " in said(run)
    assert content_of(newest.with_name(f"set-aside-{newest.name}")) == content
    assert resumed_from(run)[0] == int(before.name.removeprefix("step-"))
    assert checkpoint_files(run) == checkpoint_files(uninterrupted)
    assert logged(run) == logged(uninterrupted)


def test_where_no_checkpoint_is_good_the_job_ends_and_leaves_the_run_as_it_is(killed):
    folder = copied(killed)
    for checkpoint in checkpoints_of(folder):
        flip_a_byte_of_the_optimizer(checkpoint)
    refused = trained(*JOB, "--resume", cwd=folder, returncode=2)
    assert "no checkpoint in run/checkpoints verifies: step-" in said(refused)
    assert len(checkpoints_of(folder)) == 3
    assert (folder / "run" / "metrics.jsonl").read_bytes() == (killed / "metrics.jsonl").read_bytes()


def test_a_run_goes_on_from_the_checkpoint_that_is_named_and_newer_ones_are_set_aside(killed, uninterrupted):
    folder = copied(killed)
    oldest, *newer = [path.name for path in checkpoints_of(folder)]
    run = trained(*JOB, "--resume", f"run/checkpoints/{oldest}", cwd=folder)
    assert resumed_from(run)[0] == int(oldest.removeprefix("step-"))
    aside = sorted(path.name for path in (folder / "run" / "checkpoints").glob("set-aside-*"))
    assert aside == [f"set-aside-{name}" for name in newer]
    assert logged(run) == logged(uninterrupted)
    assert checkpoint_files(run) == checkpoint_files(uninterrupted)
