"""What a drill trains, a small task that disturbs its own job, and what its runs left behind."""

import itertools
import json
import math
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hvdtrain.callbacks import Callback, RunContext
from hvdtrain.models import mlp
from hvdtrain.reporting.records import read_indices
from hvdtrain.reporting.report import SUMMARY_FILE
from hvdtrain.reporting.stored_runs import read_records
from hvdtrain.storage.text import some

if TYPE_CHECKING:
    from hvdtrain.backends.step_metrics import StepMetrics
    from hvdtrain.metrics import StepInfo

SAMPLES, INPUTS, OUTPUTS = 480, 6, 3
MARK = "disturbed-at"  # a file in the run directory

_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "leave": signal.SIGTERM}
_DISTURBANCE = re.compile(r"(\w+)@(\d+)#(\d+)")


class Drill:
    """Learn a smooth map of random numbers; the curve does not depend on the number of workers."""

    loss = "mse"
    defaults: ClassVar = {
        "global_batch_size": 24, "learning_rate": 0.02, "epochs": 8, "warmup_epochs": 1,
        "lr_schedule": "cosine", "log_every": 1, "eval_every": "1epoch", "save_every": 25,
        "trace_indices": True, "initial_parameters": "portable",
    }  # fmt: skip

    def __init__(self, disturb: str = "", step_seconds: float = 0.03) -> None:
        self._disturb, self._step_seconds = disturb, step_seconds

    def train_data(self) -> Mapping[str, Any]:
        """Return inputs (480, 6), targets (480, 3)."""
        return _data(0, SAMPLES)

    def eval_data(self) -> Mapping[str, Any]:
        """Return 48 samples of the same form."""
        return _data(1, SAMPLES // 10)

    def callbacks(self) -> list[Callback]:
        """Return what slows down each step, and disturbs the job at one of them."""
        return [_Disturbing(self._disturb, self._step_seconds)]

    def torch_model(self) -> Any:
        """Return the PyTorch model."""
        return mlp.torch_model((INPUTS,), OUTPUTS, hidden=(16,))

    def tf_model(self) -> Any:
        """Return the Keras model."""
        return mlp.tf_model((INPUTS,), OUTPUTS, hidden=(16,))


def _data(seed: int, samples: int) -> Mapping[str, Any]:
    random = np.random.RandomState(seed)
    inputs = random.randn(samples, INPUTS).astype("float32")
    return {"inputs": inputs, "targets": np.tanh(2 * inputs[:, :OUTPUTS])}


class _Disturbing(Callback):
    every_rank = True

    def __init__(self, disturb: str, step_seconds: float) -> None:
        self._match, self._step_seconds = _DISTURBANCE.fullmatch(disturb), step_seconds
        self._what, self._run_dir = "", Path()

    def on_start(self, context: RunContext) -> None:
        self._run_dir = context.run_dir
        self._what = self._match[1] if self._match and context.rank == int(self._match[2]) else ""

    def on_step(self, step: "StepInfo", metrics: "StepMetrics") -> None:
        time.sleep(self._step_seconds)
        if not self._match or not self._what or step.step != int(self._match[3]):
            return
        try:
            with (self._run_dir / MARK).open("x") as file:
                file.write(str(time.time()))
        except FileExistsError:  # a worker that replaces the disturbed one has its rank
            return
        os.kill(os.getpid(), _SIGNALS[self._what])


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
            list(read_records(run_dir)),
            {step: sorted(indices) for step, indices in read_indices(run_dir).items()},
            json.loads(summary.read_text()) if summary.is_file() else {},
        )

    def of_phase(self, name: str, phase: str = "train") -> list[Any]:
        """Return a value of the lines of a phase, in the order of the log."""
        return [line[name] for line in self.lines if line["phase"] == phase]

    def steps(self, phase: str = "train") -> list[int]:
        """Return the steps of the lines of a phase, in the order of the log."""
        return self.of_phase("step", phase)


def differences(found: History, expected: History) -> list[str]:
    """Describe what a disturbed run lost or did twice; nothing if it is as the undisturbed one."""
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
