"""Killed at any moment of a run that saves at every step: no checkpoint is half, no step is lost."""

import os
import random
import re
import signal
import sys
import time
from functools import partial
from pathlib import Path

from support.jobs import LIMIT_SECONDS, Run, started, temporary_folder
from support.resuming import TASKS, last_step, logged, paused, trained, trained_steps

from hvdtrain.checkpoints.storage import checkpoints_in, verify

SCRIPT = Path(__file__).with_name("forked_runs.py")
HIDDEN = "30000"  # neurons: 3.6 MB a checkpoint, so that a kill finds it half written
STEPS = 110
KILLS = 12


def kill_when_it_trains(job: started, folder: Path, moments: random.Random, kill_it) -> None:
    """Kill when it has trained for some steps more and a bit."""
    step = last_step(folder) + moments.randint(1, 4)
    job.until(lambda: last_step(folder) >= step)
    time.sleep(moments.uniform(0, 0.03))
    kill_it()


def kill_when_it_saves(job: started, folder: Path, kill_it) -> None:
    """Kill when a checkpoint is half written or half deleted; to be sure, the job is paused first."""
    step = last_step(folder) + 2  # the first save clears away what the kill before has left
    job.until(lambda: last_step(folder) >= step)
    while True:
        job.until(lambda: has_unfinished(folder))
        with paused(job):
            if has_unfinished(folder):
                kill_it()
                return


def has_unfinished(folder: Path) -> bool:
    """Whether a checkpoint is half written or half deleted."""
    return any((folder / "run" / "checkpoints").glob(".*-step-*"))


def start(number: int, job: started, folder: Path, moments: random.Random) -> str:
    """Let the run start, kill it but the last time, and give what that start has printed."""
    printed = len(job.result().stdout)
    (folder / f"start-{number}").touch()
    if number < KILLS:
        job.until((folder / f"pid-{number}").exists)
        kill_it = partial(os.kill, int((folder / f"pid-{number}").read_text()), signal.SIGKILL)
        if number % 6 == 5:  # while it starts
            time.sleep(moments.uniform(0, 0.4))
            kill_it()
        elif number % 3 == 1:
            kill_when_it_saves(job, folder, kill_it)
        else:
            kill_when_it_trains(job, folder, moments, kill_it)
    job.until((folder / f"ended-{number}").exists)
    code = int((folder / f"ended-{number}").read_text())
    assert code == (-signal.SIGKILL if number < KILLS else 0), job.result().output[-5000:]
    return job.result().stdout[printed:]


def test_no_kill_takes_a_step_or_the_newest_checkpoint_away():
    """Without a launcher, killed and started again in child processes of one script."""
    folder, newest, continued, unfinished = temporary_folder(), [0], [], 0
    moments = random.Random("alone")
    command = [sys.executable, str(SCRIPT), f"{TASKS}:Fit", HIDDEN, str(STEPS)]
    with started(command, folder, OMP_NUM_THREADS="1") as job:
        for number in range(KILLS + 1):
            text = start(number, job, folder, moments)
            match = re.search(r"starts from\s+\S+:\s+step\s+([\d,]+),", text)
            if match:  # else killed before it says so
                continued.append(int(match[1].replace(",", "")))
                assert continued[-1] == newest[-1], "each start goes on from the newest"
            found = [verify(path) for path in checkpoints_in(folder / "run" / "checkpoints")]
            newest.append(found[-1].manifest.step if found else 0)
            unfinished += has_unfinished(folder)
        result = job.wait(LIMIT_SECONDS)
    print(
        f"{KILLS} kills, {unfinished} in a save; newest checkpoint after each: {newest}; resumed: {continued}"
    )
    assert match, "the last start says where it goes on from"
    assert result.returncode == 0, result.output[-5000:]
    assert unfinished >= KILLS // 4, "kills come while a checkpoint is written"
    assert newest == sorted(newest)

    run = Run(folder / "run", result)
    uninterrupted = trained(
        *(1, "none", "Fit", "--framework", "torch", "--set", f"task_options.hidden={HIDDEN}"),
        *("--steps", str(STEPS), "--set", "save_every=null"),
        cwd=temporary_folder(),
    )
    assert trained_steps(run) == list(range(1, STEPS + 1))
    assert logged(run) == logged(uninterrupted)
    left = sorted(path.name[:5] for path in (run.folder / "checkpoints").iterdir())
    assert left == ["step-"] * 2, "nothing half written is left"
