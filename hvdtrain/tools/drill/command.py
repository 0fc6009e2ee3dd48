"""The command: an undisturbed run, then the same run disturbed in every way, in each framework."""

import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.table import Column, Table
from rich.text import Text

from hvdtrain.checkpoints.storage import checkpoints_in
from hvdtrain.errors import EXIT_DONE, EXIT_STOPPED, EXIT_TRAINING, EnvironmentFault, UsageError
from hvdtrain.horovod_build.installed import horovodrun_path
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.hostfile import HostSlots, parse_host_list, read_host_file
from hvdtrain.host.launcher import check_is_not_launched, open_console
from hvdtrain.reporting.stored_runs import read_records
from hvdtrain.storage.text import printable
from hvdtrain.tools.drill.task import MARK, History, differences
from hvdtrain.tools.launch import RunningJob
from hvdtrain.tools.output import write_json

_TASK = "hvdtrain.tools.drill.task:Drill"
_AT_STEP = 45
_HERE, _MOST = 3, 16  # workers if no hosts are given, and on hosts at most if their number is not given
_FIRST_SECONDS = 300.0
_FACTOR, _MORE_SECONDS = 5.0, 120.0  # the limit of a disturbed job, from the time of the undisturbed one
_COOLDOWN = ("--blacklist-cooldown-range", "2", "60")  # seconds for which a slot that failed is left out
Ended = tuple[int | None, str]  # exit code of the last job, None if it did not end in time; its output


@dataclass
class Outcome:
    """The result of a case."""

    case: str
    framework: str
    lost: list[str] = field(default_factory=list)  # what was lost or done twice
    seconds: float = 0.0
    recovery_seconds: float | None = None  # the longest time without training; None if training did not pause
    steps: int = 0
    samples: int = 0
    loss: float | None = None  # the last one
    output: str = ""  # the end of what the jobs printed, if something was lost


class Drilled(NamedTuple):
    """How the jobs of a case run: the launcher's command, and what each job is given."""

    launcher: Sequence[str]
    workers: int
    framework: str
    run_dir: Path
    limit_seconds: float

    def job(self, disturb: str = "", *options: str) -> RunningJob:
        """Start an elastic job of the task ``Drill``."""
        training = [sys.executable, "-m", "hvdtrain", "--framework", self.framework, "--task", _TASK]
        given = ["--run-dir", str(self.run_dir), "--set", f"task_options={{disturb: '{disturb}'}}", *options]
        return RunningJob([*self.launcher, *training, *given])

    def train(self, disturb: str = "", *options: str) -> Ended:
        """Run such a job to its end."""
        with self.job(disturb, *options) as job:
            return job.wait(self.limit_seconds)


def run_case(
    name: str, run: Callable[[Drilled], Ended], drilled: Drilled, expected: History | None
) -> Outcome:
    """Run a case and compare what it left with the undisturbed run; None if this is that run."""
    outcome = Outcome(name, drilled.framework)
    begun = time.monotonic()
    code, output = run(drilled)
    outcome.seconds = time.monotonic() - begun
    history = History.of(drilled.run_dir)
    outcome.steps, outcome.samples = len(set(history.steps())), sum(map(len, history.indices.values()))
    outcome.loss = next(reversed(history.of_phase("loss")), None)
    outcome.recovery_seconds = max(history.of_phase("pause_seconds", "event"), default=0.0) or None
    if code != EXIT_DONE:
        ended = "did not end in time" if code is None else f"ended with exit code {code}"
        outcome.lost.append(f"the job {ended}")
    outcome.lost += differences(history, expected or history)
    if outcome.lost:
        outcome.output = output
    return outcome


def _disturbed(what: str, rank: int | None, options: Sequence[str], drilled: Drilled) -> Ended:
    """Train a job that the worker of a rank, or the last one, disturbs."""
    worker = drilled.workers - 1 if rank is None else rank
    code, output = drilled.train(f"{what}@{worker}#{_AT_STEP}", *options)
    mark = drilled.run_dir / MARK
    if code == EXIT_DONE and not mark.exists():
        return None, f"rank {worker} was never disturbed\n{output}"
    return code, output


def _damaged(drilled: Drilled) -> Ended:
    """Stop the job, damage its newest checkpoint, and resume."""
    until, step = time.monotonic() + drilled.limit_seconds, 0
    with drilled.job() as job:
        while step < _AT_STEP + 15 and time.monotonic() < until and job.process.poll() is None:
            time.sleep(0.05)
            lines = read_records(drilled.run_dir)
            step = max((line["step"] for line in lines if line["phase"] == "train"), default=0)
        if step >= _AT_STEP + 15:
            job.process.terminate()
        code, output = job.wait(drilled.limit_seconds)
    if code != EXIT_STOPPED:
        return code or None, output
    newest = max(checkpoints_in(drilled.run_dir / "checkpoints"))
    largest = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return drilled.train("", "--resume")


_STALL = ("--stall-timeout", "5")
_CASES: dict[str, Callable[[Drilled], Ended]] = {  # what happens to a job, and what makes it happen
    "undisturbed": Drilled.train,
    "a worker is killed": partial(_disturbed, "kill", None, ()),
    "rank 0 is killed": partial(_disturbed, "kill", 0, ()),
    "a worker is frozen": partial(_disturbed, "freeze", None, _STALL),
    "a worker gets SIGTERM": partial(_disturbed, "leave", None, ()),
    "the newest checkpoint is damaged": _damaged,
}


def _show(outcomes: Sequence[Outcome]) -> None:
    """Print a row per case, what was lost, and the conclusion."""
    numbers = [Column(name, justify="right") for name in ("recovered in s", "steps", "samples", "last loss")]
    names: list[Column | str] = ["framework", Column("case", min_width=20), *numbers, "result"]
    table, console = Table(*names, box=None, pad_edge=False, padding=(0, 2, 0, 0)), open_console()
    for one in outcomes:
        seconds = "" if one.recovery_seconds is None else f"{one.recovery_seconds:.1f}"
        loss = "" if one.loss is None else f"{one.loss:.6f}"
        result = "[bold red]LOST" if one.lost else "[green]nothing lost"
        table.add_row(one.framework, one.case, seconds, f"{one.steps:,}", f"{one.samples:,}", loss, result)
    console.print(table)
    for one in outcomes:
        for text in one.lost:
            console.print(Text(f"{one.framework}, {one.case}: {printable(text)}"))
        if one.output:
            console.print(Text(printable(one.output)), style="dim")
    lost, cases = sum(bool(one.lost) for one in outcomes), len(outcomes)
    nothing = f"{cases} cases: no step and no sample was lost or done twice."
    console.print(Text(f"{lost} of {cases} cases lost something." if lost else nothing))


def run_drill(options: Mapping[str, Any]) -> int:
    """Run the command with its options, by name, and return its exit code: 4 if anything was lost."""
    launcher, workers = _launch(options)
    folder = Path(options["folder"])
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--folder {folder}: it is not empty", "Give one that does not exist.")
    outcomes: list[Outcome] = []
    for framework in FRAMEWORKS if options["framework"] == "both" else (options["framework"],):
        expected, limit_seconds = None, _FIRST_SECONDS
        for number, (name, run) in enumerate(_CASES.items()):
            click.echo(f"{framework}: {name} ...", err=True)
            run_dir = folder / f"{framework}-{number}"
            drilled = Drilled(launcher, workers, framework, run_dir, limit_seconds)
            outcome = run_case(name, run, drilled, expected)
            outcomes.append(outcome)
            if not number:
                if outcome.lost:
                    problem = f"the undisturbed job in {framework} failed: {'; '.join(outcome.lost)}"
                    words = [framework, *launcher[launcher.index("-H") :]]
                    doctor = f"python -m hvdtrain doctor --framework {shlex.join(words)}"
                    raise EnvironmentFault(problem, f"{outcome.output}\nRun the doctor: {doctor}")
                expected = History.of(run_dir)
                limit_seconds = _FACTOR * outcome.seconds + _MORE_SECONDS
            elif not outcome.lost and not options["keep"]:
                shutil.rmtree(run_dir, ignore_errors=True)
    _show(outcomes)
    lost = sum(bool(outcome.lost) for outcome in outcomes)
    write_json(options["json_path"], {"lost": lost, "cases": [asdict(outcome) for outcome in outcomes]})
    if lost:
        click.echo(f"The runs that lost something are in {folder}.")
        return EXIT_TRAINING
    if not options["keep"]:
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_DONE


def _launch(options: Mapping[str, Any]) -> tuple[list[str], int]:
    """Return the launcher's command and the number of workers."""
    check_is_not_launched("drill", "-H HOSTS")
    if options["hostfile"] and options["hosts"]:
        raise UsageError("--hostfile and -H both name hosts", "Give one of them.")
    if options["hostfile"]:
        hosts: Sequence[HostSlots] = read_host_file(options["hostfile"])
    else:
        hosts = parse_host_list(options["hosts"] or f"localhost:{options['workers'] or _HERE}")
    slots = sum(host.slots for host in hosts)
    workers = options["workers"] or min(slots, _MOST)
    if not 2 <= workers <= slots:
        raise UsageError(f"a drill needs 2 workers or more and a slot for each; there are {slots} slots")
    command = [horovodrun_path(), "-np", str(workers), "--min-np", "1", "--max-np", str(workers), *_COOLDOWN]
    command += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts)]
    command += ["-p", str(options["ssh_port"])] if options["ssh_port"] else []
    command += ["-i", str(options["ssh_identity_file"])] if options["ssh_identity_file"] else []
    return command, workers
