"""Launching the jobs of a drill, with a limit, and leaving nothing behind."""

import itertools
import json
import math
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.processes import kill_group, start_group
from hvdtrain.reporting.index_trace import read_indices
from hvdtrain.reporting.report import SUMMARY_FILE
from hvdtrain.storage.text import some

LOG = "metrics.jsonl"
_SHOWN = 5  # steps in a message
TOLERANCE = 1e-4  # relative difference of losses; sums over other numbers of workers round differently


@dataclass(frozen=True)
class History:
    """What a run left behind.

    Attributes:
        lines: of its log, whole ones only.
        indices: by step, the samples that all workers trained on, sorted.
        summary: how it ended; empty if it did not.
    """

    lines: Sequence[Mapping[str, Any]]
    indices: Mapping[int, Sequence[int]]
    summary: Mapping[str, Any]

    @classmethod
    def of(cls, run_dir: Path) -> "History":
        """Read a run directory."""
        summary = run_dir / SUMMARY_FILE
        return cls(
            log_lines(run_dir),
            {step: sorted(indices) for step, indices in read_indices(run_dir).items()},
            json.loads(summary.read_text()) if summary.is_file() else {},
        )

    def steps(self, phase: str = "train") -> list[int]:
        """Return the steps of the lines of a phase, in the order of the log."""
        return [line["step"] for line in self.lines if line["phase"] == phase]

    def samples(self) -> int:
        """Return how many samples were trained on."""
        return sum(map(len, self.indices.values()))

    def pause_seconds(self) -> float:
        """Return the longest time without training of a change of the workers; 0 if there was none."""
        return max((line["pause_seconds"] for line in self.lines if line["phase"] == "event"), default=0.0)

    def loss(self) -> float:
        """Return the last logged loss of training; NaN if there is none."""
        return next((line["loss"] for line in reversed(self.lines) if line["phase"] == "train"), math.nan)


def log_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's log; one that is just being written is left out."""
    path = run_dir / LOG
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def differences(found: History, expected: History) -> list[str]:
    """Return what a disturbed run lost or did twice, in words; nothing if it is as the undisturbed one.

    Args:
        found: the disturbed run.
        expected: the undisturbed one, of the same task and global batch size.
    """
    if found.summary.get("status") != "completed":
        status, error = found.summary.get("status", "unknown"), found.summary.get("error", "")
        return [f"it ended with status {status}" + (f": {error}" if error else "")]
    lost = []
    for phase, words in (("train", "logged steps"), ("eval", "evaluations")):
        lost += _differing_steps(words, found.steps(phase), expected.steps(phase))
    lost += _differing_samples(found.indices, expected.indices)
    losses = dict(zip(expected.steps(), _losses(expected), strict=True))
    for step, loss in zip(found.steps(), _losses(found), strict=True):
        if step in losses and not math.isclose(loss, losses[step], rel_tol=TOLERANCE, abs_tol=1e-6):
            lost.append(f"the loss of step {step} is {loss:.6g}, and {losses[step]:.6g} undisturbed")
            break
    if not found.summary.get("checkpoint"):
        lost.append("there is no checkpoint that verifies")
    return lost


def _losses(history: History) -> list[float]:
    return [line["loss"] for line in history.lines if line["phase"] == "train"]


def _differing_steps(words: str, found: Sequence[int], expected: Sequence[int]) -> list[str]:
    counts = Counter(found)
    missing = [step for step in expected if not counts[step]]
    twice = [step for step, count in counts.items() if count > 1]
    more = sorted(set(found) - set(expected))
    parts = [("missing", missing), ("twice", twice), ("too many", more)]
    parts.append(("out of order", [step for step, after in itertools.pairwise(found) if after < step]))
    return [f"{words} {what}: {some(steps, _SHOWN)}" for what, steps in parts if steps]


def _differing_samples(
    found: Mapping[int, Sequence[int]], expected: Mapping[int, Sequence[int]]
) -> list[str]:
    steps = [step for step in expected if list(found.get(step, ())) != list(expected[step])]
    steps += [step for step in found if step not in expected]
    return [f"samples of steps that are others than undisturbed: {some(steps, _SHOWN)}"] if steps else []


_END_SECONDS = 15.0
_TASK = "hvdtrain.tools.drill.task:Drill"


@dataclass(frozen=True)
class Launch:
    """How the jobs of a drill are launched.

    Attributes:
        workers: number of workers.
        hosts: words for horovodrun that say where they run, such as ``("-H", "h1:2,h2:2")``.
        ssh: words for horovodrun on how to reach the hosts.
        most: workers that are never exceeded; None for ``workers``.
        cooldown_seconds: the shortest and longest time for which a slot that failed is left out.
        step_seconds: how long each step takes at least.
        start_seconds: how long a worker takes to start, beside what it needs.
    """

    workers: int
    hosts: tuple[str, ...]
    ssh: tuple[str, ...] = ()
    most: int | None = None
    cooldown_seconds: tuple[int, int] = (2, 60)
    step_seconds: float = 0.03
    start_seconds: float = 0.0

    def host_names(self) -> list[str]:
        """Return the names of the hosts."""
        return [entry.partition(":")[0] for entry in self.hosts[-1].split(",")]

    def command(self, framework: str, run_dir: Path, disturb: str = "", *options: str) -> list[str]:
        """Return the command of an elastic job that trains the task of the drill.

        Args:
            framework: "torch" or "tf".
            run_dir: its run directory.
            disturb: how it disturbs itself; see ``Drill``.
            options: more options of the training.
        """
        horovodrun = Path(sys.executable).with_name("horovodrun")
        launcher = str(horovodrun) if horovodrun.is_file() else shutil.which("horovodrun")
        if launcher is None:
            raise EnvironmentFault("there is no horovodrun", "Run: python -m hvdtrain build-horovod")
        elastic = ["-np", str(self.workers), "--min-np", "1", "--max-np", str(self.most or self.workers)]
        elastic += ["--blacklist-cooldown-range", *map(str, self.cooldown_seconds)]
        times = f"step_seconds: {self.step_seconds}, start_seconds: {self.start_seconds}"
        task = f"task_options={{disturb: '{disturb}', {times}}}"
        training = [sys.executable, "-m", "hvdtrain", "--framework", framework, "--task", _TASK]
        return [
            launcher,
            *elastic,
            *self.hosts,
            *self.ssh,
            *training,
            *("--run-dir", str(run_dir), "--set", task, *options),
        ]


class RunningJob:
    """Context with a job of the drill; at its end none of its processes that started here is left."""

    def __init__(self, command: Sequence[str], run_dir: Path) -> None:
        self._run_dir = run_dir
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end of the context
        self._process = start_group(command, stdout=self._output, stderr=subprocess.STDOUT)

    def __enter__(self) -> "RunningJob":
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self.stop()
            self.wait(_END_SECONDS)
        kill_group(self._process, _END_SECONDS)
        self._output.close()

    def stop(self) -> None:
        """Ask the launcher to stop the job."""
        self._process.send_signal(signal.SIGTERM)

    def wait_for_step(self, step: int, seconds: float) -> bool:
        """Wait until a step is logged; return whether it was, before the job ended."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if any(line["phase"] == "train" and line["step"] >= step for line in log_lines(self._run_dir)):
                return True
            if self._process.poll() is not None:
                return False
            time.sleep(0.05)
        return False

    def wait(self, seconds: float) -> int | None:
        """Wait for the end of the job; return its exit code, None if it did not end in time."""
        try:
            return self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None

    def output(self) -> str:
        """Return the last lines of what the job printed."""
        self._output.seek(0)
        return "\n".join(self._output.read().decode(errors="replace").splitlines()[-20:])
