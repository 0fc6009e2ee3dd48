"""Runs in several legs: stopped or killed while they train, and resumed."""

import contextlib
import json
import os
import random
import re
import signal
import time
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from hvdtrain.reporting.lock_state import LOCK_FILE
from support import pool
from support.jobs import LIMIT_SECONDS, Run, launcher, run, started

TASKS = Path(__file__).with_name("resumed_tasks.py")
# of saves that the job waits for, and of a worker that the others wait for
_TIMED_NOTE = re.compile(
    r"(\S+ ){1,6}(waited [\d.]+ s until|was not written within) |rank \d+ is (no longer )?slower than "
)
_HELD_AFTER_STEPS = 6  # from the step at which a test steps in: by then a line of seven steps is logged
# what a clock decides
_NOT_REPEATED = {"seconds", "samples_per_second", "data_wait_fraction", "wait_fraction"}
_NOT_REPEATED |= {"slowest_rank", "peak_memory_mib"}


def command_for(workers: int, controller: str, task: str, *options: str) -> list[str]:
    """Return the command that trains one of the tasks for this in the directory ``run``."""
    training = ["python", "-m", "hvdtrain", "--task", f"{TASKS}:{task}", "--run-dir", "run", *options]
    return [*launcher(workers, controller), *training]


def trained(workers: int, controller: str, task: str, *options: str, cwd: Path, returncode: int = 0) -> Run:
    """Train one of the tasks for this in a pool, in the directory ``run``, to the end."""
    words = ("--task", f"{TASKS}:{task}", "--run-dir", "run", *options)
    result = pool.command(workers, controller, pool.framework_of(options), *words, cwd=cwd)
    assert result.returncode == returncode, f"ended with {result.returncode}:\n{result.output[-5000:]}"
    return Run(cwd / "run", result)


def finished(command: list[str], cwd: Path, timeout: float = LIMIT_SECONDS, returncode: int = 0) -> Run:
    """Run the last leg, or the only one, to its end."""
    result = run(command, cwd, timeout, OMP_NUM_THREADS="1")
    assert result.returncode == returncode, f"ended with {result.returncode}:\n{result.output[-5000:]}"
    return Run(cwd / "run", result)


def killed_at(step: int, command: list[str], cwd: Path, sample_seconds: float) -> None:
    """Start a leg and kill all of its processes at once when it has logged a step."""
    with slow(command, cwd, sample_seconds, held_from=step + _HELD_AFTER_STEPS) as job:
        job.until(lambda: last_step(cwd) >= step)
        kill(job)
    assert not (cwd / "run" / "summary.json").exists(), "the run was over before it was killed"
    print(f"killed after step {last_step(cwd)}; to be killed from step {step} on")


def stopped_at(step: int, command: list[str], cwd: Path, sample_seconds: float) -> int:
    """Start a leg without a launcher, ask it to stop when it has logged a step; return where it did."""
    with slow(command, cwd, sample_seconds, held_from=step + _HELD_AFTER_STEPS) as job:
        job.until(lambda: last_step(cwd) >= step)
        job.process.send_signal(signal.SIGTERM)
        result = job.wait(LIMIT_SECONDS)
    assert result.returncode == 75, f"ended with {result.returncode}:\n{result.output[-5000:]}"
    stopped = Run(cwd / "run", result).summary["steps"]
    print(f"stopped at step {stopped}; asked to from step {step} on")
    return stopped


def slow(command: list[str], cwd: Path, sample_seconds: float, held_from: int = 0) -> started:
    """Start a command whose task takes so long to read a sample, and a second a step from one on, if given.

    It computes with one thread, as pools do: the same leg in a pool gives the same bits.
    """
    changes = {"HVDTRAIN_TEST_SAMPLE_SECONDS": str(sample_seconds), "HVDTRAIN_TEST_HELD_FROM": str(held_from)}
    return started(command, cwd, OMP_NUM_THREADS="1", **changes)


def kill(job: started) -> None:
    """Kill every process of a job, its launcher included, and see them gone.

    They are stopped first: none sees another one end and says so before its own end.
    """
    deadline = time.monotonic() + LIMIT_SECONDS
    send(signal.SIGSTOP, job.pids())
    while (pids := job.pids()) and time.monotonic() < deadline:
        send(signal.SIGKILL, pids)
        time.sleep(0.01)
    job.await_ends()


@contextlib.contextmanager
def paused(job: started) -> Iterator[None]:
    """Context in which the processes of a job are stopped: it trains no further meanwhile."""
    pids = job.pids()
    send(signal.SIGSTOP, pids)
    try:
        yield
    finally:
        send(signal.SIGCONT, pids)


def send(signal_number: int, pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal_number)


def random_step(low: int, high: int, seed: str) -> int:
    """Draw the step after which to step in; the same in every run of a test."""
    return random.Random(seed).randint(low, high)


def last_step(cwd: Path) -> int:
    """Return the last step that the run in ``cwd`` has logged."""
    path = cwd / "run" / "metrics.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def said(run: Run) -> str:
    """Return what a run has printed, in one line."""
    return " ".join(run.result.output.split())


def notes(run: Run) -> list[str]:
    """Return the notes that a run has printed, each in one line, but those that depend on the clock."""
    return [note for note in said(run).split("note: ")[1:] if not _TIMED_NOTE.match(note)]


def resumed_from(run: Run) -> tuple[int, int]:
    """Return the step and the sample that a run says it starts from."""
    found = re.search(r"starts from \S+: step ([\d,]+), sample ([\d,]+) ", said(run))
    assert found, f"it says nothing of resuming:\n{run.result.output}"
    return tuple(int(number.replace(",", "")) for number in found.groups())


def logged(run: Run) -> list[dict]:
    """Return all that a run has logged, but what depends on the clock."""
    return repeated(run.metrics)


def repeated(lines: Iterable[dict]) -> list[dict]:
    """Return the lines of a log, but what depends on the clock."""
    return [{name: value for name, value in line.items() if name not in _NOT_REPEATED} for line in lines]


def trained_steps(run: Run) -> list[int]:
    return [line["step"] for line in run.metrics if line["phase"] == "train"]


def checkpoint_files(run: Run) -> dict[str, bytes]:
    """Return the arrays of a run's last checkpoint, as they lie on the disk."""
    newest = Path(run.folder.parent, run.summary["checkpoint"])
    return {path.name: path.read_bytes() for path in sorted(newest.glob("*.safetensors"))}


def traced(run: Run) -> dict[int, list[int]]:
    """Return the indices that all ranks together trained on, by step."""
    steps: dict[int, list[int]] = {}
    for path in sorted((run.folder / "indices").iterdir()):
        for line in map(json.loads, path.read_text().splitlines()):
            steps.setdefault(line["step"], []).extend(line["indices"])
    return steps


def stream_of(run: Run) -> list[int]:
    """Return the indices that a run trained on, in the order of its steps."""
    steps = traced(run)
    assert sorted(steps) == list(range(1, run.summary["steps"] + 1))
    return list(chain.from_iterable(steps[step] for step in sorted(steps)))


def content_of(folder: Path) -> dict[str, bytes]:
    """Return every file below a folder, but the lock, in which each job writes its name."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != LOCK_FILE]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
