"""Running jobs that end badly, and what they leave."""

import json
import time
from dataclasses import dataclass
from pathlib import Path

from support.jobs import LIMIT_SECONDS, launcher, started

TASKS = Path(__file__).with_name("faulty_tasks.py")
# In which a job ends after a worker failed, left or was asked to stop: some 1 to 5 on an idle machine.
# It is far below the shortest limit that would end a job in which nobody notices: 120 s, of --stall-timeout.
SOON_SECONDS = 60
SOON_WITH_IMPORT_SECONDS = 110  # likewise, from before frameworks are imported


@dataclass(frozen=True)
class Ending:
    """How a job ended.

    Args:
        folder: its working directory; the run directory is ``run`` in it.
        returncode: the launcher's.
        output: all that was printed.
        started: when it was launched, in seconds since 1970.
        ended: when its last process was gone, likewise.
    """

    folder: Path
    returncode: int
    output: str
    started: float
    ended: float

    @property
    def seconds(self) -> float:
        """Seconds from the launch to the end of the last process."""
        return self.ended - self.started

    def seconds_since_failure(self) -> float:
        """Give the seconds from the failure, which the task noted, to the end of the last process."""
        return self.ended - float((self.folder / "failed-at").read_text())

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "run" / "summary.json").read_text())


def command_for(workers: int, controller: str, task: str, *options: str) -> list[str]:
    """Give the command that trains a faulty task."""
    training = ["python", "-m", "hvdtrain", "--task", f"{TASKS}:{task}", "--run-dir", "run", *options]
    return [*launcher(workers, controller), *training]


def end_of(
    workers: int, controller: str, task: str, *options: str, cwd: Path, timeout: float = LIMIT_SECONDS
) -> Ending:
    """Train a faulty task until the last process is gone."""
    return run_to_end(command_for(workers, controller, task, *options), cwd, timeout)


def run_to_end(command: list[str], cwd: Path, timeout: float = LIMIT_SECONDS, **changes: str) -> Ending:
    """Run a command until its last process is gone."""
    with started(command, cwd, **changes) as job:
        return ended(job, cwd, timeout)


def ended(job: started, cwd: Path, timeout: float = LIMIT_SECONDS) -> Ending:
    """Wait until the last process of a job is gone."""
    result = job.wait(timeout)
    deadline = time.monotonic() + timeout
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.02)
    return Ending(cwd, result.returncode, job.result().output, job.since, time.time())


def wait_until(condition, seconds: float = LIMIT_SECONDS) -> None:
    """Wait for what a job is about to do.

    Raises:
        AssertionError: where it does not.
    """
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the job did not get there"
        time.sleep(0.05)


def steps_logged(cwd: Path) -> int:
    """Count the lines that the job in ``cwd`` has logged."""
    path = cwd / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
