"""Run directories as jobs leave them, written by hand."""

import json
from pathlib import Path
from typing import Any

SUMMARY = {
    "status": "completed", "framework": "torch", "task": "digits", "workers": 2, "steps": 40, "samples": 1280,
    "epochs": 4.0, "seconds": 8.0, "samples_per_second": 160.0, "final": {"loss": 0.2, "accuracy": 0.9},
    "run_dir": "run",
}  # fmt: skip
CONFIG = "framework: torch\ntask: digits\nepochs: 4.0\nsteps: null\nlearning_rate: 0.1\n"


def window(step: int, **values: Any) -> dict[str, Any]:
    """Return a record of a training window; 10 steps are an epoch and 2 seconds."""
    return {
        "phase": "train", "step": step, "samples": 32 * step, "epoch": step / 10, "loss": 1 / step,
        "learning_rate": 0.1, "samples_per_second": 160.0, "data_wait_fraction": 0.1, "workers": 2,
        "seconds": step / 5, **values,
    }  # fmt: skip


def evaluation(step: int, **values: Any) -> dict[str, Any]:
    """Return a record of an evaluation."""
    metrics = values or {"loss": 2 / step, "accuracy": 1 - 1 / step}
    return {
        "phase": "eval", "step": step, "samples": 32 * step, "epoch": step / 10, **metrics,
        "learning_rate": 0.1, "samples_per_second": 500.0, "workers": 2, "seconds": step / 5,
    }  # fmt: skip


def change(step: int, **values: Any) -> dict[str, Any]:
    """Return a record of a change of the workers."""
    return {
        "phase": "event", "step": step, "samples": 32 * step, "epoch": step / 10, "event": "changed",
        "left": ["rank 1 on h2: killed (SIGKILL)"], "joined": [], "cause": "", "generation": 2,
        "pause_seconds": 0.5, "workers": 1, "seconds": step / 5, **values,
    }  # fmt: skip


def lines_of(*records: dict[str, Any]) -> str:
    """Return records as a log has them."""
    return "".join(json.dumps(record) + "\n" for record in records)


def make_run(
    folder: Path, *records: dict[str, Any], summary: dict[str, Any] | None = SUMMARY, config: str = CONFIG
) -> Path:
    """Make a run directory."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "metrics.jsonl").write_text(lines_of(*records))
    if summary is not None:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder
