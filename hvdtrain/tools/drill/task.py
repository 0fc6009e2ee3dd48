"""What a drill trains: a small task that disturbs its own job, once, at a step and on a worker."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hvdtrain.callbacks import Callback, RunContext
from hvdtrain.errors import TaskError
from hvdtrain.host.processes import start_group
from hvdtrain.models import mlp

if TYPE_CHECKING:
    from hvdtrain.backends.step_metrics import StepMetrics
    from hvdtrain.metrics import StepInfo

SAMPLES, INPUTS, OUTPUTS = 480, 6, 3
CUT_SECONDS = 45  # more than a host may be silent
MARK = "disturbed-at"  # a file in the run directory

_SIGNALS = {"kill": signal.SIGKILL, "freeze": signal.SIGSTOP, "leave": signal.SIGTERM}
_DISTURBANCE = re.compile(r"(\w+)@(\d+)#(\d+)")
_DROP = "iptables -w -{0} INPUT -j DROP; iptables -w -{0} OUTPUT -j DROP"


class Drill:
    """Learn a smooth map of random numbers; the curve does not depend on the number of workers.

    Args:
        disturb: what one worker does to itself, such as "kill@1#60": what ("kill", "freeze", "leave" or
            "cut", which cuts off its host), the worker's rank, and the step; empty for nothing.
        step_seconds: how long each step takes at least.
    """

    loss = "mse"
    defaults: ClassVar = {
        "global_batch_size": 24,
        "learning_rate": 0.02,
        "epochs": 8,
        "warmup_epochs": 1,
        "lr_schedule": "cosine",
        "log_every": 1,
        "eval_every": "1epoch",
        "save_every": 25,
        "trace_indices": True,
        "initial_parameters": "portable",
    }

    def __init__(self, disturb: str = "", step_seconds: float = 0.03) -> None:
        if disturb and not _DISTURBANCE.fullmatch(disturb):
            raise TaskError(f"disturb: {disturb!r} is not such as 'kill@1#60'")
        self._disturb, self._step_seconds = disturb, step_seconds

    def train_data(self) -> Mapping[str, Any]:
        """Return the training data: inputs (6,), targets (3,)."""
        return _data(0, SAMPLES)

    def eval_data(self) -> Mapping[str, Any]:
        """Return the evaluation data, of the same form."""
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
        if self._what == "cut":
            commands = f"{_DROP.format('I')}; sleep {CUT_SECONDS}; {_DROP.format('D')}"
            start_group(["sh", "-c", commands], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        else:
            os.kill(os.getpid(), _SIGNALS[self._what])
