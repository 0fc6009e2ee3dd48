"""The command: an undisturbed run, then the same run disturbed in every way, in each framework."""

import json
import os
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hvdtrain.checkpoints.storage import checkpoints_in
from hvdtrain.errors import EXIT_DONE, EXIT_STOPPED, EXIT_TRAINING, EnvironmentFault, UsageError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.host.hostfile import parse_host_list, read_host_file
from hvdtrain.host.launcher import launched_rank, open_console
from hvdtrain.storage.text import printable
from hvdtrain.tools.drill.jobs import History, Launch, RunningJob, differences
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


def to_document(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return the outcomes as JSON-ready values."""
    return {
        "lost": sum(bool(outcome.lost) for outcome in outcomes),
        "cases": [asdict(outcome) for outcome in outcomes],
    }


def show(outcomes: Sequence[Outcome], console: Console) -> None:
    """Print a row per case, what was lost, and the conclusion."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("framework")
    table.add_column("case", min_width=20)
    for name in ("recovered in s", "steps", "samples", "last loss"):
        table.add_column(name, justify="right")
    table.add_column("result")
    for outcome in outcomes:
        table.add_row(*_cells(outcome))
    console.print(table)
    for outcome in outcomes:
        for text in outcome.lost:
            console.print(Text(f"{outcome.framework}, {outcome.case}: {printable(text)}"))
        if outcome.output:
            console.print(Text(printable(outcome.output)), style="dim")
    console.print(Text(_conclusion(outcomes)))


def _cells(outcome: Outcome) -> list[str | Text]:
    if outcome.not_tried:
        return [outcome.framework, outcome.case, "", "", "", "", Text(f"not tried: {outcome.not_tried}")]
    seconds = "" if outcome.recovery_seconds is None else f"{outcome.recovery_seconds:.1f}"
    loss = "" if outcome.loss is None else f"{outcome.loss:.6f}"
    result = Text("LOST", style="bold red") if outcome.lost else Text("nothing lost", style="green")
    numbers = [seconds, f"{outcome.steps:,}", f"{outcome.samples:,}", loss]
    return [outcome.framework, outcome.case, *numbers, result]


def _conclusion(outcomes: Sequence[Outcome]) -> str:
    lost = [outcome for outcome in outcomes if outcome.lost]
    left_out = sum(bool(outcome.not_tried) for outcome in outcomes)
    tried = len(outcomes) - left_out
    more = f"; {left_out} not tried" if left_out else ""
    if lost:
        return f"{len(lost)} of {tried} cases lost something{more}."
    return f"{tried} cases: no step and no sample was lost or done twice{more}."


_HERE = 3  # workers if no hosts are given
_MOST = 16
_FIRST_SECONDS = 300.0
_FACTOR, _MORE_SECONDS = 5.0, 120.0  # the limit of a disturbed job, from the time of the undisturbed one


def run_drill(options: Mapping[str, Any]) -> int:
    """Run the command, and return its exit code: 4 if anything was lost.

    Args:
        options: the options of the command, by name.

    Raises:
        UsageError: If options contradict each other, or a launcher started this process.
        EnvironmentFault: If the undisturbed job cannot run.
    """
    launch, folder = _launch(options), Path(options["folder"])
    if folder.exists() and any(folder.iterdir()):
        raise UsageError(f"--folder {folder}: it is not empty", "Give one that does not exist.")
    frameworks = FRAMEWORKS if options["framework"] == "both" else (options["framework"],)
    cases = (*CASES, CUT_OFF) if options["hosts_may_fail"] else CASES
    outcomes: list[Outcome] = []
    for framework in frameworks:
        expected, limit_seconds = None, _FIRST_SECONDS
        for number, case in enumerate((UNDISTURBED, *cases)):
            click.echo(f"{framework}: {case.name} ...", err=True)
            drilled = Drilled(launch, framework, folder / f"{framework}-{number}", limit_seconds)
            outcome = run_case(case, drilled, expected)
            outcomes.append(outcome)
            if case is UNDISTURBED:
                if outcome.lost:
                    problem = f"the undisturbed job in {framework} failed: {'; '.join(outcome.lost)}"
                    raise EnvironmentFault(
                        problem, f"{outcome.output}\nRun the doctor: {doctor_command(options)}"
                    )
                expected = History.of(drilled.run_dir)
                limit_seconds = _FACTOR * outcome.seconds + _MORE_SECONDS
            elif not outcome.lost and not options["keep"]:
                shutil.rmtree(drilled.run_dir, ignore_errors=True)
    show(outcomes, open_console())
    if options["json_path"]:
        options["json_path"].write_text(json.dumps(to_document(outcomes), indent=2) + "\n", encoding="utf-8")
    if any(outcome.lost for outcome in outcomes):
        click.echo(f"The runs that lost something are in {folder}.")
        return EXIT_TRAINING
    if not options["keep"]:
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_DONE


def doctor_command(options: Mapping[str, Any]) -> str:
    """Return the command that checks the hosts of a drill.

    Args:
        options: the options of the drill, by name.
    """
    words = ["python", "-m", "hvdtrain", "doctor"]
    named = {"-H": "hosts", "--hostfile": "hostfile", "--ssh-port": "ssh_port"}
    named |= {"--ssh-identity-file": "ssh_identity_file"}
    for flag, name in named.items():
        words += [flag, str(options[name])] if options[name] else []
    words += ["--framework", options["framework"]] if options["framework"] != "both" else []
    return shlex.join(words)


def _launch(options: Mapping[str, Any]) -> Launch:
    if launched_rank() is not None:
        raise UsageError(
            "the drill launches jobs itself, but a launcher has started this process",
            "Run it without the launcher, with -H or --hostfile for several hosts.",
        )
    if options["hostfile"] and options["hosts"]:
        raise UsageError("--hostfile and -H both name hosts", "Give one of them.")
    ssh = ["-p", str(options["ssh_port"])] if options["ssh_port"] else []
    if options["ssh_identity_file"]:
        ssh += ["-i", str(options["ssh_identity_file"])]
    if not options["hostfile"] and not options["hosts"]:
        workers = options["workers"] or _HERE
        return Launch(workers, ("-H", f"localhost:{workers}"), ssh=tuple(ssh))
    named = read_host_file(options["hostfile"]) if options["hostfile"] else parse_host_list(options["hosts"])
    slots = sum(host.slots for host in named)
    workers = options["workers"] or min(slots, _MOST)
    if not 2 <= workers <= slots:
        raise UsageError(f"a drill needs 2 workers or more and a slot for each; there are {slots} slots")
    hosts = ",".join(f"{host.name}:{host.slots}" for host in named)
    return Launch(workers, ("-H", hosts), ssh=tuple(ssh))
