"""Elastic jobs: how long a change takes, what being elastic costs, and whether anything is lost.

python benchmarks/elastic.py recovery          # a worker is killed: seconds to the next steps
python benchmarks/elastic.py workers           # the same with 2, 4, 8 and 16 workers
python benchmarks/elastic.py joiner            # a worker comes: seconds without training
python benchmarks/elastic.py steady            # steps of an elastic job against a fixed one
python benchmarks/elastic.py kills --count 20  # at random moments; exit code 4 if anything is lost
python benchmarks/elastic.py chaos --seconds 600
"""

import contextlib
import json
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import click

from hvdtrain.horovod_build.installed import horovodrun_path
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.reporting.stored_runs import read_records
from hvdtrain.tools.drill.task import Drill, History, differences
from hvdtrain.tools.launch import RunningJob

STATE = "HVDTRAIN_ELASTIC_STATE"
LIMIT_SECONDS = 180.0
STALL_SECONDS = 5
STOPPED = 75
TRAINING_SECONDS = 4.0  # of a job of the drill, less the end


class SlowToStart(Drill):
    """The drill's task, whose workers take so many seconds more to start."""

    def __init__(self, step_seconds: float = 0.03, start_seconds: float = 0.0) -> None:
        super().__init__(step_seconds=step_seconds)
        time.sleep(start_seconds)


@dataclass(frozen=True)
class Launch:
    """How an elastic job is launched."""

    workers: int
    hosts: tuple[str, ...]
    most: int | None = None
    cooldown_seconds: tuple[int, int] = (2, 60)
    step_seconds: float = 0.03
    start_seconds: float = 0.0

    def command(self, framework: str, run_dir: Path, *options: str) -> list[str]:
        """Give the command of a job that trains the drill's task."""
        words = ["-np", str(self.workers), "--min-np", "1", "--max-np", str(self.most or self.workers)]
        words += ["--blacklist-cooldown-range", *map(str, self.cooldown_seconds), *self.hosts]
        training = [sys.executable, "-m", "hvdtrain", "--task", f"{__file__}:SlowToStart"]
        seconds = f"{{step_seconds: {self.step_seconds}, start_seconds: {self.start_seconds}}}"
        training += ["--framework", framework, "--run-dir", str(run_dir), "--set", f"task_options={seconds}"]
        return [horovodrun_path(), *words, *training, *options]


def here(workers: int) -> Launch:
    """Give the launch of an elastic job on this machine."""
    return Launch(workers, ("-H", f"localhost:{workers}"))


def scripted(folder: Path, slots: int, most: int) -> Launch:
    """Give the launch of a job whose discovery script shows what the file ``slots`` holds."""
    script = folder / "hosts.sh"
    set_slots(folder, slots)
    script.write_text(f'#!/bin/sh\necho "localhost:$(cat {folder}/slots)"\n')
    script.chmod(0o755)
    return Launch(slots, ("--host-discovery-script", str(script)), most=most)


def set_slots(folder: Path, slots: int) -> None:
    """Change what the discovery script shows."""
    (folder / "slots.new").write_text(str(slots))
    os.replace(folder / "slots.new", folder / "slots")


@contextlib.contextmanager
def running(launch: Launch, framework: str, folder: Path, *options: str) -> Iterator[RunningJob]:
    """Give a context with a job that trains in ``folder / "run"``."""
    os.environ[STATE] = str(folder / "state.json")
    with RunningJob(launch.command(framework, folder / "run", *options)) as job:
        yield job


def members(folder: Path) -> dict[int, int]:
    """Give the process of each rank of the world that there is."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return {one["rank"]: one["pid"] for one in json.loads((folder / "state.json").read_text())["members"]}
    return {}


def last_step(folder: Path) -> int:
    """Give the last step that is logged."""
    return max((line["step"] for line in read_records(folder / "run") if line["phase"] == "train"), default=0)


def next_step_seconds(folder: Path, act: Callable[[], None]) -> float:
    """Do something to a job; give the seconds to the first step that is logged from then on and goes on.

    Two steps: the one under way may have been finished before.
    """
    step, begun = last_step(folder), time.monotonic()
    act()
    while last_step(folder) < step + 3:
        if time.monotonic() > begun + LIMIT_SECONDS:
            raise click.ClickException("training does not go on")
        time.sleep(0.005)
    return time.monotonic() - begun


def kill(folder: Path, rank: int, number: int = signal.SIGKILL) -> None:
    """Send a signal to the worker of a rank."""
    if (pid := members(folder).get(rank)) is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def undisturbed(framework: str, folder: Path, *options: str) -> History:
    """Give what a job leaves that nothing happens to."""
    folder.mkdir()
    launch = replace(here(2), step_seconds=0.0)
    with running(launch, framework, folder, *options) as job:
        finish(job, "the undisturbed job", 600.0)
    return History.of(folder / "run")


def finish(job: RunningJob, words: str, seconds: float = LIMIT_SECONDS) -> None:
    """Wait for the end of a job, which must be a good one."""
    code, output = job.wait(seconds)
    if code != 0:
        raise click.ClickException(f"{words} ended with {code}:\n{output}")


def wait_for_step(step: int, job: RunningJob, folder: Path) -> None:
    """Wait until a step is logged."""
    until = time.monotonic() + LIMIT_SECONDS
    while last_step(folder) < step:
        if time.monotonic() > until or job.process.poll() is not None:
            raise click.ClickException(job.wait(0)[1])
        time.sleep(0.05)


def show(words: str, seconds: list[float]) -> None:
    """Print the median and the range."""
    print(
        f"{words}: median {statistics.median(seconds):.2f} s, {min(seconds):.2f} to {max(seconds):.2f} s "
        f"in {len(seconds)}",
        flush=True,
    )


@click.group()
def main() -> None:
    """Measure elastic jobs on this machine."""


_framework = click.option(
    "--framework", type=click.Choice([*FRAMEWORKS]), multiple=True, default=[*FRAMEWORKS]
)


@main.command()
@_framework
@click.option("--count", default=10)
def recovery(framework: tuple[str, ...], count: int) -> None:
    """Kill a worker of three: seconds to the next steps, without a joiner in them."""
    for name in framework:
        show(f"{name}, 3 workers, one killed", [_recovery(name, 3, number % 3) for number in range(count)])


def _recovery(framework: str, workers: int, rank: int) -> float:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        launch = replace(here(workers), cooldown_seconds=(60, 60))
        with running(launch, framework, folder) as job:
            wait_for_step(30, job, folder)
            seconds = next_step_seconds(folder, lambda: kill(folder, rank))
            finish(job, "the job")
    return seconds


@main.command()
@_framework
@click.option("--count", default=3)
def workers(framework: tuple[str, ...], count: int) -> None:
    """Kill a worker of 2, 4, 8 and 16."""
    for name in framework:
        for size in (2, 4, 8, 16):
            seconds = [_recovery(name, size, size - 1) for _ in range(count)]
            show(f"{name}, {size} workers, one killed", seconds)


@main.command()
@_framework
@click.option("--start-seconds", multiple=True, type=float, default=[0.0, 40.0])
def joiner(framework: tuple[str, ...], start_seconds: tuple[float, ...]) -> None:
    """Let a third worker join; it needs so many seconds more to start."""
    for name in framework:
        for seconds in start_seconds:
            print(
                f"{name}, a joiner that starts in {seconds:g} s more: {_pause(name, seconds):.2f} s",
                flush=True,
            )


def _pause(framework: str, start_seconds: float) -> float:
    with tempfile.TemporaryDirectory() as folder_name:
        folder = Path(folder_name)
        launch = replace(scripted(folder, 2, 3), step_seconds=0.1, start_seconds=start_seconds)
        epochs = 10 + round(start_seconds / 2)
        with running(launch, framework, folder, "--epochs", str(epochs)) as job:
            wait_for_step(20, job, folder)
            set_slots(folder, 3)
            finish(job, "the job", 600.0)
        return History.of(folder / "run").pause_seconds()


@main.command()
@_framework
@click.option("--count", default=5)
def steady(framework: tuple[str, ...], count: int) -> None:
    """Compare samples/s of the built-in task digits, elastic and fixed, over Gloo, in turns."""
    horovodrun = horovodrun_path()
    training = [
        sys.executable,
        "-m",
        "hvdtrain",
        "--task",
        "digits",
        "--epochs",
        "15",
        "--eval-every",
        "null",
    ]
    kinds = {"fixed": ["--gloo", "-np", "2"], "elastic": ["-np", "2", "--min-np", "1", "-H", "localhost:2"]}
    for name in framework:
        speeds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(count):
            for kind, words in kinds.items():
                with tempfile.TemporaryDirectory() as folder_name:
                    run = Path(folder_name) / "run"
                    options = ["--framework", name, "--run-dir", str(run)]
                    with RunningJob([horovodrun, *words, *training, *options]) as job:
                        finish(job, f"the {kind} job")
                    speeds[kind].append(History.of(run).summary["samples_per_second"])
        ratios = [one / other for one, other in zip(speeds["fixed"], speeds["elastic"], strict=True)]
        print(
            f"{name}: a step of an elastic job takes {statistics.median(ratios):.3f} of a fixed one's",
            flush=True,
        )


@main.command()
@_framework
@click.option("--count", default=20)
@click.option("--seed", default=0)
def kills(framework: tuple[str, ...], count: int, seed: int) -> None:
    """Kill a random worker of three at a random moment, each time in a job of its own.

    In every second job another worker is killed within a second: while the others go on without the first, or
    while the one that replaces it joins.
    """
    lost = 0
    for name in framework:
        with tempfile.TemporaryDirectory() as folder_name:
            folder, chance = Path(folder_name), random.Random(seed)
            expected = undisturbed(name, folder / "undisturbed")
            for number in range(count):
                inner = folder / str(number)
                inner.mkdir()
                ranks = [chance.randrange(3) for _ in range(1 + number % 2)]
                launch = replace(here(3), cooldown_seconds=(1, 5))
                with running(launch, name, inner) as job:
                    wait_for_step(1, job, inner)
                    time.sleep(chance.uniform(0, TRAINING_SECONDS))
                    for rank in ranks:
                        kill(inner, rank)
                        time.sleep(chance.uniform(0, 1.0))
                    words = f"rank {', then '.join(map(str, ranks))}"
                    finish(job, f"the job after the kill of {words}")
                history = History.of(inner / "run")
                found = differences(history, expected)
                lost += bool(found)
                worlds = sum(line["phase"] == "event" for line in history.lines)
                print(
                    f"{name}, job {number + 1} of {count}, {words} killed, {worlds} changes: "
                    f"{found or 'nothing lost'}",
                    flush=True,
                )
    sys.exit(4 if lost else 0)


@main.command()
@_framework
@click.option("--seconds", default=600.0)
@click.option("--seed", default=0)
def chaos(framework: tuple[str, ...], seconds: float, seed: int) -> None:
    """Kill, freeze, remove and add workers every few seconds; resume a job whose last worker was to leave."""
    for name in framework:
        with tempfile.TemporaryDirectory() as folder_name:
            _chaos(name, Path(folder_name), seconds, random.Random(seed))


def _chaos(framework: str, folder: Path, seconds: float, chance: random.Random) -> None:
    epochs = max(6, round(seconds / 3))
    options = ("--epochs", str(epochs), "--stall-timeout", str(STALL_SECONDS))
    expected = undisturbed(framework, folder / "undisturbed", *options)
    launch = replace(scripted(folder, 3, 4), step_seconds=0.03, cooldown_seconds=(1, 5))
    done = dict.fromkeys(("killed", "frozen", "SIGTERM", "slots", "resumed"), 0)
    until, code = time.monotonic() + seconds, STOPPED
    resume: tuple[str, ...] = ()
    while code == STOPPED:
        with running(launch, framework, folder, *options, *resume) as job:
            wait_for_step(last_step(folder) + 5, job, folder)
            _disturb(job, folder, until, chance, done)
            set_slots(folder, 3)
            code, output = job.wait(600.0)
            if code not in (0, STOPPED):
                raise click.ClickException(f"the job ended with {code}:\n{output}")
        if code == STOPPED:  # the last worker that trained was told to leave
            resume = ("--resume",)
            done["resumed"] += 1
    history = History.of(folder / "run")
    found = differences(history, expected)
    worlds = sum(line["phase"] == "event" for line in history.lines)
    print(f"{framework}, {seconds:g} s, {done}: {worlds} changes, {found or 'nothing lost'}", flush=True)
    if found:
        sys.exit(4)


def _disturb(
    job: RunningJob, folder: Path, until: float, chance: random.Random, done: dict[str, int]
) -> None:
    """Disturb a job every few seconds while it runs."""
    numbers = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP, "SIGTERM": signal.SIGTERM}
    while time.monotonic() < until and job.process.poll() is None:
        what = chance.choice([*numbers, "slots"])
        done[what] += 1
        if what == "slots":
            set_slots(folder, chance.randint(1, 4))
        else:
            kill(folder, chance.choice([*members(folder)] or [0]), numbers[what])
        time.sleep(chance.uniform(0.2, 4.0))


if __name__ == "__main__":
    main()
