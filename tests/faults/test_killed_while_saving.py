"""Killed at any moment of a run that saves at every step: no checkpoint is half, no step is lost."""

import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
from support.jobs import LIMIT_SECONDS, Run, started, temporary_folder
from support.resuming import (
    TASKS,
    await_in,
    last_step,
    logged,
    paused,
    trained,
    trained_steps,
)

from hvdtrain.checkpoints.storage import checkpoints_in, verify

SCRIPT = Path(__file__).with_name("forked_runs.py")
HIDDEN = "30000"  # neurons: 3.6 MB a checkpoint, so that a kill finds it half written
STEPS = 110
KILLS = 12


@dataclass
class Killed:
    """What was seen of a run that was killed again and again.

    Args:
        folder: its working directory.
        run: the run, once it has ended well.
        newest: step of the newest checkpoint after each start; 0 where there was none.
        said: step that each start said it goes on from; None where it was killed before, or said none.
        unfinished: kills that found a checkpoint half written or half deleted.
    """

    folder: Path
    run: Run | None = None
    newest: list[int] = field(default_factory=list)
    said: list[int | None] = field(default_factory=list)
    unfinished: int = 0

    def look(self, printed: str) -> None:
        """Check every checkpoint that is listed after a start has ended; note the newest."""
        checkpoints = self.folder / "run" / "checkpoints"
        found = [verify(path) for path in checkpoints_in(checkpoints)]
        self.newest.append(found[-1].manifest.step if found else 0)
        self.unfinished += has_unfinished(self.folder)
        match = re.search(r"starts from\s+\S+:\s+step\s+([\d,]+),", printed)
        self.said.append(int(match[1].replace(",", "")) if match else None)


def kill_while_it_starts(random: random.Random, kill_it: Callable[[], None]) -> None:
    time.sleep(random.uniform(0, 0.4))
    kill_it()


def kill_while_it_trains(
    job: started, folder: Path, random: random.Random, kill_it: Callable[[], None]
) -> None:
    """Kill when it has trained for some steps more and a bit."""
    step = last_step(folder) + random.randint(1, 4)
    await_in(job, lambda: last_step(folder) >= step)
    time.sleep(random.uniform(0, 0.03))
    kill_it()


def kill_while_it_saves(job: started, folder: Path, kill_it: Callable[[], None]) -> None:
    """Kill when a checkpoint is half written or half deleted; to be sure, the job is paused first."""
    step = last_step(folder) + 2  # the first save clears away what the kill before has left
    await_in(job, lambda: last_step(folder) >= step)
    while True:
        await_in(job, lambda: has_unfinished(folder))
        with paused(job):
            if has_unfinished(folder):
                kill_it()
                return


def has_unfinished(folder: Path) -> bool:
    """Whether a checkpoint is half written or half deleted."""
    return any((folder / "run" / "checkpoints").glob(".*-step-*"))


@pytest.fixture
def killed() -> Killed:
    """Train without a launcher, killed and started again in child processes of one script."""
    folder = temporary_folder()
    seen, random_moments, printed = Killed(folder), random.Random("alone"), 0
    command = [sys.executable, str(SCRIPT), f"{TASKS}:Fit", HIDDEN, str(STEPS)]
    with started(command, folder, OMP_NUM_THREADS="1") as job:
        for number in range(KILLS + 1):
            (folder / f"start-{number}").touch()
            if number < KILLS:
                await_in(job, (folder / f"pid-{number}").exists)
                kill_it = partial(os.kill, int((folder / f"pid-{number}").read_text()), signal.SIGKILL)
                if number % 6 == 5:
                    kill_while_it_starts(random_moments, kill_it)
                elif number % 3 == 1:
                    kill_while_it_saves(job, folder, kill_it)
                else:
                    kill_while_it_trains(job, folder, random_moments, kill_it)
            await_in(job, (folder / f"ended-{number}").exists)
            output = job.result().stdout
            code = int((folder / f"ended-{number}").read_text())
            assert code == (-signal.SIGKILL if number < KILLS else 0), job.result().output[-5000:]
            seen.look(output[printed:])
            printed = len(output)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 0, result.output[-5000:]
    seen.run = Run(folder / "run", result)
    print(
        f"{KILLS} kills, {seen.unfinished} with a checkpoint half written or half deleted; "
        f"newest checkpoint after each: {seen.newest}; starts said: {seen.said}"
    )
    return seen


def test_no_kill_takes_a_step_or_the_newest_checkpoint_away(killed):
    uninterrupted = trained(
        *(1, "none", "Fit", "--framework", "torch", "--set", f"task_options.hidden={HIDDEN}"),
        *("--steps", str(STEPS), "--set", "save_every=null"),
        cwd=temporary_folder(),
    )
    assert killed.unfinished >= KILLS // 4, "kills come while a checkpoint is written"
    before = [0, *killed.newest[:-1]]
    found = [(said, newest) for said, newest in zip(killed.said, before, strict=True) if said is not None]
    assert [said for said, _ in found] == [newest for _, newest in found], (
        "each start goes on from the newest"
    )
    assert killed.said[-1] is not None
    assert killed.newest == sorted(killed.newest)
    assert trained_steps(killed.run) == list(range(1, STEPS + 1))
    assert logged(killed.run) == logged(uninterrupted)
    left = sorted(path.name[:5] for path in (killed.run.folder / "checkpoints").iterdir())
    assert left == ["step-"] * 2, "nothing half written is left"
