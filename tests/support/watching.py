"""A report on a console that a test can read, and what it is told."""

import io
import json

from rich.console import Console

from hvdtrain.backends.step_metrics import StepMetrics
from hvdtrain.callbacks import RunContext, Summary
from hvdtrain.config import Config
from hvdtrain.metrics import StepInfo
from hvdtrain.reporting.run_report import RunReport

METRICS = StepMetrics({"loss": 1.0}, 4.0)
MEANS = {"loss": 0.5, "accuracy": 0.75}


def step_info(step: int) -> StepInfo:
    return StepInfo(step, (step - 1) * 4, step * 4, step / 4, 2, 0.03125, 0.0)


def summary(**changes: object) -> Summary:
    values = {
        "status": "completed",
        "framework": "torch",
        "task": "digits",
        "workers": 2,
        "steps": 1234,
        "samples": 4936,
        "epochs": 2.5,
        "seconds": 12.25,
        "samples_per_second": 5000.0,
        "final": {"loss": 0.125, "accuracy": 0.975},
        "run_dir": "runs/x",
    }
    return Summary(**{**values, **changes})


def run_context(folder, **fields: object) -> RunContext:
    config = Config(framework="torch", epochs=1)
    return RunContext(**{"rank": 0, "workers": 2, "config": config, "run_dir": folder, **fields})


class Watched:
    """A report on a console that a test can read."""

    def __init__(self, folder, terminal: bool = False, callbacks=(), width: int = 200, **fields) -> None:
        self.file = io.StringIO()
        self.console = Console(file=self.file, force_terminal=terminal, width=width, _environ={})
        self.report = RunReport(self.console, run_context(folder, **fields), callbacks=callbacks)

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    def step(self, step: int) -> None:
        self.report.on_step(step_info(step), METRICS)

    def log(self, step: int) -> None:
        self.step(step)
        self.report.on_window(step_info(step), MEANS, 2000.0)


def records(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
