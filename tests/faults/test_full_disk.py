"""The disk fills up, fails or goes away while a run trains: training goes on, what was saved stays."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from jobs import FRAMEWORKS, Result, Run, temporary_folder
from resuming import await_in, command_for, said, slow

from hvdtrain.checkpoint import checkpoints_in, verify

NEEDED = ("mkfs.ext4", "mount", "umount")
pytestmark = pytest.mark.skipif(
    os.getuid() != 0 or not all(map(shutil.which, NEEDED)) or not Path("/dev/loop-control").exists(),
    reason=f"needs root, {', '.join(NEEDED)} and loop devices",
)
SAMPLE_SECONDS = 0.01
STEPS = 60
OPTIONS = (
    *("--steps", str(STEPS), "--save-every", "5", "--keep-last", "2"),
    *("--set", "task_options.hidden=5000"),  # 0.6 MB a checkpoint
)


@contextmanager
def small_disk(folder: Path, megabytes: int = 8) -> Iterator[None]:
    """Context with a disk of its own, of a few MB, below a folder."""
    image = folder.with_name(f"{folder.name}.img")
    folder.mkdir()
    image.touch()
    os.truncate(image, megabytes << 20)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, folder], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        image.unlink()


def free_bytes(folder: Path) -> int:
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def fill(folder: Path, left: int = 0) -> None:
    """Fill a disk up to so many bytes, as another program might."""
    with (folder / "filler").open("ab", buffering=0) as file:
        try:
            while free_bytes(folder) > left:
                file.write(bytes(min(65536, max(4096, free_bytes(folder) - left))))
                os.fsync(file.fileno())
        except OSError:
            pass
