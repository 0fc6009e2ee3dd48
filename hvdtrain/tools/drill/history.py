"""What a run left behind, and how two of them differ."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hvdtrain.reporting.index_trace import read_indices
from hvdtrain.reporting.report import METRICS_FILE, SUMMARY_FILE
from hvdtrain.storage.text import some

_SHOWN = 5  # steps in a message
_TOLERANCE = 1e-4  # relative difference of losses; sums over other numbers of workers round differently


@dataclass(frozen=True)
class History:
    """What a run left behind."""

    lines: Sequence[Mapping[str, Any]]  # of its log, whole ones only
    indices: Mapping[int, Sequence[int]]  # by step, the samples that all workers trained on, sorted
    summary: Mapping[str, Any]  # how it ended; empty if it did not

    @classmethod
    def of(cls, run_dir: Path) -> "History":
        """Read a run directory."""
        summary = run_dir / SUMMARY_FILE
        return cls(
            log_lines(run_dir),
            {step: sorted(indices) for step, indices in read_indices(run_dir).items()},
            json.loads(summary.read_text()) if summary.is_file() else {},
        )

    def of_phase(self, name: str, phase: str = "train") -> list[Any]:
        """Return a value of the lines of a phase, in the order of the log."""
        return [line[name] for line in self.lines if line["phase"] == phase]

    def steps(self, phase: str = "train") -> list[int]:
        """Return the steps of the lines of a phase, in the order of the log."""
        return self.of_phase("step", phase)

    def samples(self) -> int:
        """Return how many samples were trained on."""
        return sum(map(len, self.indices.values()))

    def pause_seconds(self) -> float:
        """Return the longest time without training of a change of the workers; 0 if there was none."""
        return max(self.of_phase("pause_seconds", "event"), default=0.0)


def log_lines(run_dir: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a run's log; one that is just being written is left out."""
    path = run_dir / METRICS_FILE
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]


def differences(found: History, expected: History) -> list[str]:
    """Describe what a disturbed run lost or did twice; nothing if it is as the undisturbed one.

    Args:
        found: the disturbed run.
        expected: the undisturbed one, of the same task and global batch size.
    """
    if found.summary.get("status") != "completed":
        status, error = found.summary.get("status", "unknown"), found.summary.get("error", "")
        return [f"it ended with status {status}" + (f": {error}" if error else "")]
    lost = []
    for phase, name in (("train", "logged steps"), ("eval", "evaluations")):
        steps, known = found.steps(phase), expected.steps(phase)
        counts = Counter(steps)
        parts = {
            "missing": [step for step in known if not counts[step]],
            "twice": [step for step, count in counts.items() if count > 1],
            "too many": sorted(counts.keys() - set(known)),
            "out of order": [step for step, after in itertools.pairwise(steps) if after < step],
        }
        lost += [f"{name} {what}: {some(wrong, _SHOWN)}" for what, wrong in parts.items() if wrong]
    steps = sorted(
        step
        for step in found.indices.keys() | expected.indices.keys()
        if list(found.indices.get(step, ())) != list(expected.indices.get(step, ()))
    )
    if steps:
        lost.append(f"samples of steps that are others than undisturbed: {some(steps, _SHOWN)}")
    losses = dict(zip(expected.steps(), expected.of_phase("loss"), strict=True))
    for step, loss in zip(found.steps(), found.of_phase("loss"), strict=True):
        if step in losses and not math.isclose(loss, losses[step], rel_tol=_TOLERANCE, abs_tol=1e-6):
            lost.append(f"the loss of step {step} is {loss:.6g}, and {losses[step]:.6g} undisturbed")
            break
    return lost + ([] if found.summary.get("checkpoint") else ["there is no checkpoint that verifies"])
