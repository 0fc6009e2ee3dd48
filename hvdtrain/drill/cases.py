"""The cases of a drill: what happens to a job, and what must come out."""

import os
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hvdtrain.checkpoints.storage import checkpoints_in
from hvdtrain.drill.history import History, differences
from hvdtrain.errors import EXIT_DONE, EXIT_STOPPED
from hvdtrain.tools.drill.jobs import Launch, RunningJob
from hvdtrain.tools.drill.task import CUT_SECONDS, MARK

AT_STEP = 45
_FULL_BYTES = 3 << 20
_FULL_SECONDS = 1.0
_STALL = ("--stall-timeout", "5")


@dataclass
class Outcome:
    """What came of a case.

    Attributes:
        case: its name.
        framework: "torch" or "tf".
        lost: what was lost or done twice, in words; empty if nothing was.
        not_tried: why it was not tried; empty if it was.
        seconds: of the whole case.
        recovery_seconds: the longest time without training; None if training did not pause.
        steps: steps in the surviving history.
        samples: samples trained on in it.
        loss: the last loss.
        output: the end of what the jobs printed, if something was lost.
    """

    case: str
    framework: str
    lost: list[str] = field(default_factory=list)
    not_tried: str = ""
    seconds: float = 0.0
    recovery_seconds: float | None = None
    steps: int = 0
    samples: int = 0
    loss: float | None = None
    output: str = ""


@dataclass(frozen=True)
class Drilled:
    """A case under way.

    Attributes:
        launch: how its jobs are launched.
        framework: "torch" or "tf".
        run_dir: where they write.
        limit_seconds: the longest time for each job.
    """

    launch: Launch
    framework: str
    run_dir: Path
    limit_seconds: float


@dataclass(frozen=True)
class Case:
    """Something that happens to a job.

    Attributes:
        name: what it is called in the table.
        run: makes it happen; returns the exit code of the last job, None if it did not end, and its output.
        reason: returns why it cannot be tried here; an empty text if it can.
    """

    name: str
    run: Callable[[Drilled], tuple[int | None, str]]
    reason: Callable[[Launch], str] = lambda launch: ""


def run_case(case: Case, drilled: Drilled, expected: History | None) -> Outcome:
    """Run a case and compare what it left with the undisturbed run.

    Args:
        case: the case.
        drilled: how and where.
        expected: what the undisturbed run left; None if this is the undisturbed run.
    """
    outcome = Outcome(case.name, drilled.framework, not_tried=case.reason(drilled.launch))
    if outcome.not_tried:
        return outcome
    begun = time.monotonic()
    code, output = case.run(drilled)
    outcome.seconds = time.monotonic() - begun
    history = History.of(drilled.run_dir)
    outcome.steps, outcome.samples = len(set(history.steps())), history.samples()
    outcome.loss = history.loss() if history.steps() else None
    outcome.recovery_seconds = history.pause_seconds() or None
    if code != EXIT_DONE:
        ended = "did not end in time" if code is None else f"ended with exit code {code}"
        outcome.lost.append(f"the job {ended}")
    outcome.lost += differences(history, expected or history)
    if outcome.lost:
        outcome.output = output
    return outcome


def _train(drilled: Drilled, disturb: str = "", *options: str) -> tuple[int | None, str]:
    command = drilled.launch.command(drilled.framework, drilled.run_dir, disturb, *options)
    with RunningJob(command, drilled.run_dir) as job:
        return job.wait(drilled.limit_seconds), job.output()


def _disturbed(what: str, rank: int | None, *options: str) -> Callable[[Drilled], tuple[int | None, str]]:
    """Return what trains a job that one of its workers disturbs.

    Args:
        what: see ``Drill``.
        rank: the worker; None for the last one.
        options: options of the training.
    """

    def run(drilled: Drilled) -> tuple[int | None, str]:
        worker = drilled.launch.workers - 1 if rank is None else rank
        code, output = _train(drilled, f"{what}@{worker}#{AT_STEP}", *options)
        mark = drilled.run_dir / MARK
        if code == EXIT_DONE and not mark.exists():
            return None, f"rank {worker} was never disturbed\n{output}"
        if what == "cut" and mark.exists():  # leave the cluster as it was
            time.sleep(max(0.0, float(mark.read_text()) + CUT_SECONDS + 1 - time.time()))
        return code, output

    return run


def _damaged(drilled: Drilled) -> tuple[int | None, str]:
    """Stop the job, damage its newest checkpoint, and go on."""
    command = drilled.launch.command(drilled.framework, drilled.run_dir)
    with RunningJob(command, drilled.run_dir) as job:
        if job.wait_for_step(AT_STEP + 15, drilled.limit_seconds):
            job.stop()
        code, output = job.wait(drilled.limit_seconds), job.output()
    if code != EXIT_STOPPED:
        return code or None, output
    newest = max(checkpoints_in(drilled.run_dir / "checkpoints"))
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return _train(drilled, "", "--resume")


def _full(drilled: Drilled) -> tuple[int | None, str]:
    """Fill the file system of the run directory for a moment, and empty it again."""
    folder = drilled.run_dir.parent / f"{drilled.run_dir.name}-full"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={_FULL_BYTES}", "tmpfs", folder], check=True)
    try:
        inner = Drilled(drilled.launch, drilled.framework, folder / "run", drilled.limit_seconds)
        with RunningJob(inner.launch.command(inner.framework, inner.run_dir), inner.run_dir) as job:
            if job.wait_for_step(AT_STEP, inner.limit_seconds):
                with suppress(OSError), (folder / "filler").open("wb", buffering=0) as filler:
                    while filler.write(bytes(1 << 12)):
                        pass
                time.sleep(_FULL_SECONDS)
                (folder / "filler").unlink()
            code, output = job.wait(inner.limit_seconds), job.output()
        shutil.copytree(inner.run_dir, drilled.run_dir)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=False)
        folder.rmdir()
    return code, output


def _cannot_fill(launch: Launch) -> str:
    if os.getuid() or not shutil.which("mount"):
        return "mounting a small file system needs root"
    if len(launch.host_names()) > 1:
        return "a small file system is mounted on this host only"
    probe = Path("/proc/self/status").read_text(encoding="ascii")
    effective = next(line for line in probe.splitlines() if line.startswith("CapEff:")).split()[1]
    return "" if int(effective, 16) >> 21 & 1 else "mounting a small file system needs CAP_SYS_ADMIN"


def _cannot_cut(launch: Launch) -> str:
    if len(launch.host_names()) < 2:
        return "it needs two hosts: give -H or --hostfile"
    if os.getuid():
        return "cutting off a host (iptables) needs root"
    return ""


UNDISTURBED = Case("undisturbed", _train)
CASES = (
    Case("a worker is killed", _disturbed("kill", None)),
    Case("rank 0 is killed", _disturbed("kill", 0)),
    Case("a worker is frozen", _disturbed("freeze", None, *_STALL)),
    Case("a worker gets SIGTERM", _disturbed("leave", None)),
    Case("the newest checkpoint is damaged", _damaged),
    Case("the run directory is full", _full, _cannot_fill),
)
CUT_OFF = Case("a host is cut off", _disturbed("cut", None, *_STALL), _cannot_cut)
