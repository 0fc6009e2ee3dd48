"""The run directory: rank 0 makes it and writes in it, the others learn its name."""

from datetime import datetime
from pathlib import Path

from hvdtrain.backends.base import Workers
from hvdtrain.cluster import on_root
from hvdtrain.config import Config
from hvdtrain.errors import ConfigError, EnvironmentFault
from hvdtrain.logs import cut_log, write_whole
from hvdtrain.report import Report, RunReport, SilentReport
from hvdtrain.terminal import open_console

_METRICS, _SUMMARY = "metrics.jsonl", "summary.json"
CHECKPOINTS = "checkpoints"


def open_run(config: Config, workers: Workers, resumed_step: int | None = None) -> tuple[Report, Path]:
    """Collective. Make the run directory, or cut one back to where training goes on, and the report.

    Args:
        config: the resolved config.
        workers: the workers.
        resumed_step: steps done, where the run goes on in a directory that has it already.

    Raises:
        ConfigError: where ``run_dir`` already holds a run that this one does not go on with.
        EnvironmentFault: where it cannot be made or written.
    """
    report: Report = SilentReport()

    def prepare() -> Path:
        nonlocal report
        try:
            path = _make(config) if resumed_step is None else Path(config.run_dir or "")
            path.mkdir(parents=True, exist_ok=True)
            write_whole(path / "config.yaml", config.to_yaml())  # first: it tells a full disk
            if resumed_step is not None:
                _cut_back(path, resumed_step)
            report = RunReport(open_console(), path, resumed_step)
        except OSError as error:
            raise EnvironmentFault(f"cannot make the run directory: {error}") from None
        return path

    path = on_root(workers, prepare)
    return report, path


def _make(config: Config) -> Path:
    if config.run_dir is not None:
        path = Path(config.run_dir)
        path.mkdir(parents=True, exist_ok=True)
        for name in (_METRICS, _SUMMARY, CHECKPOINTS):
            if (path / name).exists():
                raise ConfigError(
                    f"run_dir: {path} already holds a run ({name})",
                    "Add --resume to go on with it, choose another --run-dir, or move it away.",
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


def _cut_back(path: Path, step: int) -> None:
    """Take out of a run's logs what came after a step: it is going to be done again."""
    for log in (path / _METRICS, *sorted((path / "indices").glob("rank-*.jsonl"))):
        if log.exists():
            cut_log(log, step)
    (path / _SUMMARY).unlink(missing_ok=True)
