"""The disk fills up, fails or goes away while a run trains: training goes on, what was saved stays."""

import json
import os
import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.jobs import LIMIT_SECONDS, Run, run, started, temporary_folder
from support.resuming import command_for, content_of, finished, last_step, paused, said, slow, trained_steps

from hvdtrain.checkpoints.storage import checkpoints_in, verify

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


def train(disk: Path, happen: Callable[[started], None], steps: int) -> tuple[Run, list[int]]:
    """Train on a disk; let something happen to it once the checkpoint of step 10 is there.

    Returns:
        The run, and the steps of its checkpoints, all of which verify; nothing half written is left.
    """
    command = command_for(1, "none", "Fit", "--framework", "torch", *OPTIONS, "--steps", str(steps))
    checkpoints = disk / "run" / "checkpoints"
    with slow(command, disk, SAMPLE_SECONDS) as job:
        job.until((checkpoints / "step-00000010").exists)
        happen(job)
        run = Run(disk / "run", job.wait(LIMIT_SECONDS))
    found = checkpoints_in(checkpoints)
    assert sorted(found) == sorted(checkpoints.iterdir())
    assert trained_steps(run) == list(range(1, steps + 1))
    return run, [verify(path).manifest.step for path in found]


def test_a_full_disk_does_not_stop_training_and_leaves_the_newest_checkpoint():
    """There is no room for checkpoints any more to the end, but some for the logs."""

    def keep_full(job: started) -> None:
        with paused(job):
            fill(disk, left=300_000)
        job.until(lambda: job.process.poll() is not None or fill(disk, left=300_000))

    with small_disk("tmpfs") as disk:
        full, (newest,) = train(disk, keep_full, STEPS)
        summary, text = full.summary, said(full)
    assert (full.result.returncode, summary["status"]) == (3, "unsaved")
    assert f"the checkpoint could not be written: step {STEPS}: No space left on device" in text
    assert 10 <= newest < STEPS
    failed = re.findall(
        r"cannot write the checkpoint of step (\d+): No space left on device \(\S+\); (\S+) is whole; "
        "training continues, the next save tries again",
        text,
    )
    assert failed == [(str(newest + 5), f"run/checkpoints/step-{newest:08d}")], "it is said once"
    assert summary["failed_saves"] == (STEPS - newest) // 5
    assert summary["save_error"].startswith(f"step {STEPS}: No space left on device")
    assert summary["checkpoint"] == f"run/checkpoints/step-{newest:08d}"


def test_once_there_is_room_the_log_is_complete_and_the_next_save_succeeds():
    """The disk is filled to the last byte; once checkpoint and log have failed, there is room."""
    while_full = []

    def fill_and_free(job: started) -> None:
        expected = {"checkpoint", "metrics.jsonl"}
        with paused(job):
            fill(disk, left=0)
        job.until(lambda: fill(disk, left=0) or expected <= failures(job))
        while_full.append((disk / "run" / "metrics.jsonl").read_bytes())
        (disk / "filler").unlink()
        newest = checkpoints_in(disk / "run" / "checkpoints")[-1]
        job.until(lambda: checkpoints_in(disk / "run" / "checkpoints")[-1].name > newest.name)
        while_full.append(last_step(disk))

    def failures(job: started) -> set[str]:
        text = " ".join(job.result().output.split())
        return {Path(name.rstrip(":")).name for name in re.findall(r"cannot write (?:the )?(\S+)", text)}

    with small_disk("ext4") as disk:
        after, saved = train(disk, fill_and_free, LONG)
        summary = after.summary
    log, step = while_full
    *lines, rest = log.split(b"\n")
    assert rest == b"", "the log holds whole lines"
    steps = [json.loads(line)["step"] for line in lines if b'"train"' in line]
    assert steps == list(range(1, len(steps) + 1))
    assert len(steps) < LONG
    assert step < LONG
    assert saved[-1] == LONG
    assert after.result.returncode == 0
    assert summary["failed_saves"] >= 1


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
