"""The run directory: rank 0 makes it and writes in it, the others learn its name."""

from datetime import datetime
from pathlib import Path

from hvdtrain.backends.base import Workers
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, EnvironmentFault, HvdtrainError
from hvdtrain.report import Report, RunReport, SilentReport
from hvdtrain.terminal import open_console


def open_run(config: Config, workers: Workers) -> tuple[Report, Path]:
    """Collective. Make the run directory and the report.

    Raises:
        ConfigError: where ``run_dir`` already holds a run.
        EnvironmentFault: where it cannot be made or written.
    """
    report: Report = SilentReport()
    outcome: HvdtrainError | Path | None = None
    if workers.rank == 0:
        try:
            outcome = _make(config)
            (outcome / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")
            report = RunReport(open_console(), outcome)
        except HvdtrainError as error:
            outcome = error
        except OSError as error:
            outcome = EnvironmentFault(f"cannot make the run directory: {error}")
    outcome = workers.broadcast_object(outcome)
    if isinstance(outcome, HvdtrainError):
        outcome.everywhere = True
        raise outcome
    assert outcome is not None
    return report, outcome


def _make(config: Config) -> Path:
    if config.run_dir is not None:
        path = Path(config.run_dir)
        path.mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "summary.json"):
            if (path / name).exists():
                raise ConfigError(
                    f"run_dir: {path} already holds a run ({name})",
                    "Choose another --run-dir, or move it away.",
                )
        return path
    task = Path(config.task.rpartition(":")[2]).stem.lower()
    stem = Path("runs") / f"{task}-{config.framework}-{datetime.now():%Y%m%d-%H%M%S}"
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = stem.with_name(stem.name + suffix)
        try:
            path.mkdir(parents=True)
        except FileExistsError:
            continue
        return path
    raise EnvironmentFault(f"cannot make a run directory: {stem} and 98 like it exist")
