"""The disk fills up, fails or goes away while a run trains: training goes on, what was saved stays."""

import errno
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from support.jobs import LIMIT_SECONDS, Run, run, started, temporary_folder
from support.resuming import (
    await_in,
    command_for,
    content_of,
    finished,
    last_step,
    paused,
    said,
    slow,
    trained_steps,
)

from hvdtrain.checkpoints.storage import checkpoints_in, verify
from hvdtrain.reporting.jsonl import AppendFile

MEGABYTES = 8
SAMPLE_SECONDS = 0.01
STEPS, LONG = 60, 600
# a checkpoint has 0.6 MB
OPTIONS = ("--save-every", "5", "--keep-last", "1", "--set", "task_options.hidden=5000")
MAKES = {
    "ext4": lambda folder: ["mount", "-o", "loop", _image(folder), folder],
    "tmpfs": lambda folder: ["mount", "-t", "tmpfs", "-o", f"size={MEGABYTES}m", "small-disk", folder],
}


def _image(folder: Path) -> Path:
    image = folder.with_name("image")
    image.touch()
    os.truncate(image, MEGABYTES << 20)
    run_or_skip(["mkfs.ext4", "-q", "-m", "0", image])
    return image


def run_or_skip(command: list) -> None:
    """Run what may need root and a kernel that lends it a disk."""
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"cannot make a small disk: {command[0]}: {getattr(error, 'stderr', None) or error}")


@contextmanager
def small_disk(kind: str) -> Iterator[Path]:
    """Context with the folder of a small disk of its own."""
    folder = temporary_folder() / "disk"
    folder.mkdir()
    run_or_skip(MAKES[kind](folder))
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path, left: int) -> bool:
    """Fill a disk up to so many bytes, as another program might; give False."""

    def room() -> int:
        found = os.statvfs(disk)
        return found.f_bavail * found.f_frsize - left

    size = room()
    with (disk / "filler").open("ab") as file:
        while size >= 1024:
            try:
                os.posix_fallocate(file.fileno(), file.seek(0, os.SEEK_END), size)
                size = room()
            except OSError:  # not all that is free can be had
                size //= 2
    return False


def keep_full(disk: Path, job: started) -> None:
    """Leave a disk no room for a checkpoint, but some for the logs, until a job ends."""
    with paused(job):
        fill(disk, left=300_000)
    await_in(job, lambda: job.process.poll() is not None or fill(disk, left=300_000))


@dataclass(frozen=True)
class After:
    """What is left of a run whose disk something happened to.

    Args:
        run: the run; its files may be gone.
        returncode: its exit code.
        said: what it printed, in one line.
        metrics: what is in metrics.jsonl.
        steps: of the checkpoints that are listed; all of them verify.
        unfinished: names of what is half written or half deleted beside them.
        summary: what is in summary.json, if it is there.
    """

    run: Run
    returncode: int
    said: str
    metrics: bytes
    steps: list[int]
    unfinished: list[str]
    summary: dict | None


def train(disk: Path, happen: Callable[[started], None], *options: str) -> After:
    """Train on a disk; let something happen to it once the checkpoint of step 10 is there."""
    command = command_for(1, "none", "Fit", "--framework", "torch", *OPTIONS, *options)
    checkpoints = disk / "run" / "checkpoints"
    with slow(command, disk, SAMPLE_SECONDS) as job:
        await_in(job, (checkpoints / "step-00000010").exists)
        happen(job)
        run = Run(disk / "run", job.wait(LIMIT_SECONDS))
    summary, metrics = run.folder / "summary.json", run.folder / "metrics.jsonl"
    found = checkpoints_in(checkpoints)
    return After(
        run,
        run.result.returncode,
        said(run),
        metrics.read_bytes() if metrics.exists() else b"",
        [verify(path).manifest.step for path in found],
        [path.name for path in checkpoints.iterdir() if path not in found],
        json.loads(summary.read_text()) if summary.exists() else None,
    )


# --- no room for checkpoints any more, to the end


def test_a_full_disk_does_not_stop_training_and_leaves_the_newest_checkpoint():
    with small_disk("tmpfs") as disk:
        full = train(disk, partial(keep_full, disk), "--steps", str(STEPS))
        assert trained_steps(full.run) == list(range(1, STEPS + 1))
    assert (full.returncode, full.summary["status"]) == (3, "unsaved")
    assert f"the checkpoint could not be written: step {STEPS}: No space left on device" in full.said
    (newest,) = full.steps
    assert 10 <= newest < STEPS
    assert full.unfinished == []
    failed = re.findall(
        r"cannot write the checkpoint of step (\d+): No space left on device \(\S+\); (\S+) is whole; "
        "training continues, the next save tries again",
        full.said,
    )
    assert failed == [(str(newest + 5), f"run/checkpoints/step-{newest:08d}")], "it is said once"
    assert full.summary["failed_saves"] == (STEPS - newest) // 5
    assert full.summary["save_error"].startswith(f"step {STEPS}: No space left on device")
    assert full.summary["checkpoint"] == f"run/checkpoints/step-{newest:08d}"


# --- no room for anything, then some again


def test_once_there_is_room_the_log_is_complete_and_the_next_save_succeeds():
    """The disk is filled to the last byte; once checkpoint and log have failed, there is room."""
    while_full = []

    def fill_and_free(job: started) -> None:
        expected = {"checkpoint", "metrics.jsonl"}
        with paused(job):
            fill(disk, left=0)
        await_in(job, lambda: fill(disk, left=0) or expected <= failures(job))
        while_full.append((disk / "run" / "metrics.jsonl").read_bytes())
        (disk / "filler").unlink()
        newest = checkpoints_in(disk / "run" / "checkpoints")[-1]
        await_in(job, lambda: checkpoints_in(disk / "run" / "checkpoints")[-1].name > newest.name)
        while_full.append(last_step(disk))

    def failures(job: started) -> set[str]:
        text = " ".join(job.result().output.split())
        return {Path(name.rstrip(":")).name for name in re.findall(r"cannot write (?:the )?(\S+)", text)}

    with small_disk("ext4") as disk:
        after = train(disk, fill_and_free, "--steps", str(LONG))
        assert trained_steps(after.run) == list(range(1, LONG + 1))
    log, step = while_full
    *lines, rest = log.split(b"\n")
    assert rest == b"", "the log holds whole lines"
    steps = [json.loads(line)["step"] for line in lines if b'"train"' in line]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) < LONG
    assert step < LONG
    assert after.steps[-1] == LONG
    assert after.returncode == 0
    assert after.summary["failed_saves"] >= 1


def test_what_waits_for_room_is_written_at_the_end_at_the_latest():
    with small_disk("ext4") as disk:
        log = AppendFile(disk / "log")
        fill(disk, left=0)
        manifest = b"x" * 5000
        assert log.append(manifest).errno == errno.ENOSPC
        assert log.path.read_bytes() == b""
        (disk / "filler").unlink()
        log.close()
        assert log.path.read_bytes() == manifest


# --- no room to resume


def test_without_room_for_its_own_files_a_run_does_not_begin_and_changes_nothing():
    with small_disk("ext4") as disk:
        command = command_for(1, "none", "Fit", "--framework", "torch", *OPTIONS, "--resume")
        folder = finished([*command, "--steps", "7"], disk).folder
        fill(disk, left=0)
        before = content_of(folder)
        result = run([*command, "--steps", "9"], disk)
        assert content_of(folder) == before
    assert result.returncode == 3
    assert "No space left on device" in result.stderr
