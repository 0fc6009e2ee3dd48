"""Two jobs never write into one run directory, as a requeued job may while the first one still runs."""

import os
import signal

from support import pool
from support.jobs import LIMIT_SECONDS, Run, temporary_folder
from support.resuming import TASKS, command_for, last_step, slow, trained_steps

STEPS = 40
OPTIONS = ("--framework", "torch", "--steps", str(STEPS), "--save-every", "10")


def test_a_second_job_is_refused_and_does_not_disturb_the_first():
    folder = temporary_folder()
    command = command_for(1, "none", "CopiedFit", *OPTIONS, "--eval-every", "1")
    with slow(command, folder, sample_seconds=0.03) as job:
        job.until(lambda: (folder / "copy" / ".lock").exists() and last_step(folder) >= 2)
        job.process.send_signal(signal.SIGSTOP)  # so that it does not end before the others come
        words = ("--task", f"{TASKS}:CopiedFit", "--run-dir", "run", *OPTIONS, "--eval-every", "1")
        second = pool.command(1, "none", "torch", *words, "--resume", cwd=folder)
        job.process.send_signal(signal.SIGCONT)
        first = Run(folder / "run", job.wait(LIMIT_SECONDS))
    assert second.returncode == 3
    user = f"process {job.process.pid} on {os.uname().nodename}"
    assert f"run_dir: run is in use by another job: {user}" in second.stderr
    assert "Traceback" not in second.output
    assert first.result.returncode == 0
    assert trained_steps(first) == list(range(1, STEPS + 1))
    assert first.summary["status"] == "completed"
