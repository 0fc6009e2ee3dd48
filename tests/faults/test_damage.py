"""The newest checkpoint is damaged: a run says so, sets it aside and goes on from the one before."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.jobs import Run, temporary_folder
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


DAMAGES = (flip_a_byte_of_the_optimizer,)


@dataclass(frozen=True)
class Mended:
    """A run that was resumed after its newest checkpoint had been damaged.

    Args:
        run: the run.
        damaged: name of the checkpoint.
        problem: what the run must say of it.
        content: its files, after the damage.
    """

    run: Run
    damaged: str
    problem: str
    content: dict[str, bytes]


@pytest.fixture(scope="module", params=DAMAGES, ids=lambda damage: damage.__name__)
def mended(request, killed):
    folder = temporary_folder()
    shutil.copytree(killed, folder / "run")
    newest = max((folder / "run" / "checkpoints").glob("step-*"))
    problem, content = request.param(newest), content_of(newest)
    return Mended(trained(*JOB, "--resume", cwd=folder), newest.name, problem, content)


def test_it_says_which_checkpoint_is_damaged_and_why(mended):
    assert f"checkpoint run/checkpoints/{mended.damaged} is damaged: {mended.problem}; " in said(mended.run)


def test_the_damaged_checkpoint_is_set_aside_as_it_was(mended):
    aside = mended.run.folder / "checkpoints" / f"set-aside-{mended.damaged}"
    assert content_of(aside) == mended.content


def test_it_goes_on_from_the_checkpoint_before(mended):
    assert resumed_from(mended.run)[0] == int(mended.damaged.removeprefix("step-")) - 5


def test_it_ends_with_the_state_of_the_uninterrupted_run(mended, uninterrupted):
    assert checkpoint_files(mended.run) == checkpoint_files(uninterrupted)


def test_it_logs_what_the_uninterrupted_run_logs(mended, uninterrupted):
    assert logged(mended.run) == logged(uninterrupted)


@pytest.fixture(scope="module")
def half_written(killed):
    """Resume where a save was cut off: a folder under its other name, newer than all checkpoints."""
    folder = temporary_folder()
    shutil.copytree(killed, folder / "run")
    checkpoints = folder / "run" / "checkpoints"
    newest = max(checkpoints.glob("step-*"))
    later = f"step-{int(newest.name.removeprefix('step-')) + 5:08d}"
    shutil.copytree(newest, checkpoints / f".new-{later}", ignore=lambda *_: ["trainer.json"])
    return trained(*JOB, "--resume", cwd=folder), int(newest.name.removeprefix("step-"))


def test_a_half_written_checkpoint_is_not_taken_for_one(half_written):
    run, newest = half_written
    assert resumed_from(run)[0] == newest


def test_a_half_written_checkpoint_is_cleared_away(half_written):
    assert not list((half_written[0].folder / "checkpoints").glob(".*"))


def test_after_a_half_written_checkpoint_the_state_is_that_of_the_uninterrupted_run(
    half_written, uninterrupted
):
    assert checkpoint_files(half_written[0]) == checkpoint_files(uninterrupted)


def test_where_no_checkpoint_is_good_the_job_ends_and_leaves_the_run_as_it_is(killed):
    folder = temporary_folder()
    shutil.copytree(killed, folder / "run")
    for checkpoint in (folder / "run" / "checkpoints").glob("step-*"):
        flip_a_byte_of_the_optimizer(checkpoint)
    refused = trained(*JOB, "--resume", cwd=folder, returncode=2)
    assert "no checkpoint in run/checkpoints verifies: step-" in said(refused)
    assert len(list((folder / "run" / "checkpoints").glob("step-*"))) == 3
    assert (folder / "run" / "metrics.jsonl").read_bytes() == (killed / "metrics.jsonl").read_bytes()


@pytest.fixture(scope="module")
def rewound(killed):
    """Go on from the oldest checkpoint that is there, by its path."""
    folder = temporary_folder()
    shutil.copytree(killed, folder / "run")
    oldest, *newer = sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))
    return trained(*JOB, "--resume", f"run/checkpoints/{oldest}", cwd=folder), oldest, newer


def test_a_run_goes_on_from_the_checkpoint_that_is_named(rewound):
    assert resumed_from(rewound[0])[0] == int(rewound[1].removeprefix("step-"))


def test_checkpoints_newer_than_the_one_named_are_set_aside(rewound):
    run, _, newer = rewound
    aside = sorted(path.name for path in (run.folder / "checkpoints").glob("set-aside-*"))
    assert aside == [f"set-aside-{name}" for name in newer]


def test_from_the_checkpoint_that_is_named_the_run_is_the_uninterrupted_one(rewound, uninterrupted):
    assert logged(rewound[0]) == logged(uninterrupted)
    assert checkpoint_files(rewound[0]) == checkpoint_files(uninterrupted)
