"""What a run left behind, and whether it is what an undisturbed run leaves."""

import itertools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
