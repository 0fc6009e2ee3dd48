"""Two jobs never write into one run directory, as a requeued job may while the first one still runs."""

import os
import signal
from dataclasses import dataclass

import pytest
from support import pool
from support.jobs import LIMIT_SECONDS, Result, Run, temporary_folder
from support.resuming import TASKS, await_in, command_for, kill, last_step, slow, trained, trained_steps

STEPS = 40
OPTIONS = ("--framework", "torch", "--steps", str(STEPS), "--save-every", "10")


@dataclass(frozen=True)
class Met:
    """What came of jobs that met in one run directory.

    Args:
        pid: the process that was training.
        resumed: the job that was to resume the run meanwhile.
        first: the run that was there, after its end.
    """

    pid: int
    resumed: Result
    first: Run


@pytest.fixture(scope="module")
def met() -> Met:
    folder = temporary_folder()
    command = command_for(1, "none", "CopiedFit", *OPTIONS, "--eval-every", "1")
    with slow(command, folder, sample_seconds=0.03) as job:
        await_in(job, lambda: (folder / "copy" / ".lock").exists() and last_step(folder) >= 2)
        job.process.send_signal(signal.SIGSTOP)  # so that it does not end before the others come
        words = ("--task", f"{TASKS}:CopiedFit", "--run-dir", "run", *OPTIONS, "--eval-every", "1")
        resumed = pool.command(1, "none", "torch", *words, "--resume", cwd=folder)
        job.process.send_signal(signal.SIGCONT)
        return Met(job.process.pid, resumed, Run(folder / "run", job.wait(LIMIT_SECONDS)))


def test_a_second_job_is_refused_and_told_of_the_first(met):
    result = met.resumed
    assert result.returncode == 3
    assert (
        f"run_dir: run is in use by another job: process {met.pid} on {os.uname().nodename}" in result.stderr
    )
    assert "Traceback" not in result.output


def test_the_first_job_is_not_disturbed(met):
    assert met.first.result.returncode == 0
    assert trained_steps(met.first) == list(range(1, STEPS + 1))
    assert met.first.summary["status"] == "completed"


def test_a_killed_jobs_lock_does_not_stay():
    folder = temporary_folder()
    job = (1, "none", "Fit", *OPTIONS, "--resume")
    with slow(command_for(*job), folder, sample_seconds=0.03) as killed:
        await_in(killed, lambda: last_step(folder) >= 2)
        kill(killed)
    trained(*job, cwd=folder)
