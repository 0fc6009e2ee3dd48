"""Running jobs that end badly, and what they leave."""

import json
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from support.jobs import LIMIT_SECONDS, launcher, started

TASKS = Path(__file__).with_name("faulty_tasks.py")
HOST = socket.gethostname()
# In which a job ends after a worker failed, left or was asked to stop: some 1 to 5 on an idle machine.
# It is far below the shortest limit that would end a job in which nobody notices: 120 s, of --stall-timeout.
SOON_SECONDS = 60
SOON_WITH_IMPORT_SECONDS = 110  # likewise, from before frameworks are imported


@dataclass(frozen=True)
class Ending:
    """How a job ended: the launcher's code, all that was printed, and when its last process was gone."""

    folder: Path
    returncode: int
    output: str
    started: float
    ended: float
    signalled: float = 0.0

    @property
    def seconds(self) -> float:
        """Seconds to the end of the last process, from the signal or the launch."""
        return self.ended - (self.signalled or self.started)

    def seconds_since_failure(self) -> float:
        """Give the seconds from the failure, which the task noted, to the end of the last process."""
        return self.ended - float((self.folder / "failed-at").read_text())

    @property
    def summary(self) -> dict:
        return json.loads((self.folder / "run" / "summary.json").read_text())

    @property
    def message(self) -> str:
        """The only line that is a message of hvdtrain's, without the name."""
        (line,) = (line for line in self.output.splitlines() if line.startswith("hvdtrain: "))
        return line.removeprefix("hvdtrain: ")


def command_for(workers: int, controller: str, task: str, *options: str) -> list[str]:
    """Give the command that trains a faulty task."""
    training = ["python", "-m", "hvdtrain", "--task", f"{TASKS}:{task}", "--run-dir", "run", *options]
    return [*launcher(workers, controller), *training]


def slow(framework: str, controller: str, *options: str) -> list[str]:
    """Give the command of a job that trains until something ends it."""
    workers = 1 if controller == "none" else 2
    return command_for(workers, controller, "Slow", "--framework", framework, *options)


def end_of(workers: int, controller: str, task: str, *options: str, cwd: Path) -> Ending:
    """Train a faulty task until the last process is gone."""
    return run_to_end(command_for(workers, controller, task, *options), cwd)


def run_to_end(command: list[str], cwd: Path, **changes: str) -> Ending:
    """Run a command until its last process is gone."""
    with started(command, cwd, **changes) as job:
        return ended(job, cwd)


def ended(job: started, cwd: Path, signalled: float = 0.0) -> Ending:
    """Wait until the last process of a job is gone."""
    result = job.wait(LIMIT_SECONDS)
    deadline = time.monotonic() + LIMIT_SECONDS
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.02)
    return Ending(cwd, result.returncode, job.result().output, job.since, time.time(), signalled)


def signalled(command: list[str], cwd: Path, number: int, rank: int | None = None, steps: int = 3) -> Ending:
    """Signal the launcher of a job, or one worker, when it has trained for some steps; give its ending."""

    def signal(job: started) -> None:
        os.kill(job.process.pid if rank is None else int((cwd / f"pid-{rank}").read_text()), number)

    return disturbed(command, cwd, signal, steps)


def disturbed(command: list[str], cwd: Path, disturb: Callable[[started], object], steps: int = 3) -> Ending:
    """Let something happen to a job when it has trained for some steps; give its ending."""
    with started(command, cwd) as job:
        job.until(lambda: steps_logged(cwd) >= steps)
        begun = time.time()
        disturb(job)
        return ended(job, cwd, begun)


def steps_logged(cwd: Path) -> int:
    """Count the lines that the job in ``cwd`` has logged."""
    path = cwd / "run" / "metrics.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0
