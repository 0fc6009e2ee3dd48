"""Where a run starts from: nothing, the weights of a checkpoint, or a checkpoint to go on from."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hvdtrain import checkpoint
from hvdtrain.backends._averaging import averaged, holds_averages, without_averages
from hvdtrain.backends.base import Backend, PortableState
from hvdtrain.checkpoint import Checkpoint
from hvdtrain.config import Config
from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.record import Damage, Record
from hvdtrain.rundir import CHECKPOINTS
from hvdtrain.session import Progress, versions_with

# fields that say where a run is written or starts from, not what it computes
_NOT_COMPARED = {"run_dir", "resume", "init"}


@dataclass(frozen=True)
class Start:
    """Where a run starts from, as rank 0 found it.

    Attributes:
        origin: the checkpoint, in words; empty where there is none.
        progress: steps and samples done.
        record: of the checkpoint that the run goes on from, if it does.
        resumed_step: steps done, where the run goes on in a directory that has it already.
        changes: what the config has that the checkpoint's had not, in words.
        notes: what else to tell the user.
        newest: the newest good checkpoint in the run directory.
        values: value of the metric that keep_best names, by checkpoint in the run directory.
    """

    origin: str = ""
    progress: Progress = field(default_factory=Progress)
    record: Record | None = None
    resumed_step: int | None = None
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    newest: Path | None = None
    values: Mapping[Path, float | None] = field(default_factory=dict)

    def best_value(self, config: Config) -> float | None:
        """Give the best of ``values``."""
        best: float | None = None
        for value in self.values.values():
            if config.keep_best is not None and config.keep_best.improves(value, best):
                best = value
        return best


def find_start(config: Config, backend: Backend, data_size: int) -> Start:
    """Find where to start from, and load it into this worker's backend. Local: no collective.

    Args:
        config: the resolved config.
        backend: the backend, built.
        data_size: samples in the training data.

    Raises:
        CheckpointError: where the checkpoint that was named is missing or damaged, or one does not fit.
        EnvironmentFault: where a checkpoint cannot be read.
    """
    notes: list[str] = []
    found: Checkpoint | None = None
    if config.resume == "auto":
        found, notes = checkpoint.newest_good(_folder(config))
    elif config.resume is not None:
        found = checkpoint.locate(Path(config.resume))
    if found is None:
        begun = 0 if config.resume == "auto" else None  # the directory may hold a run without a checkpoint
        origin = _initialise(config, backend) if config.init is not None else ""
        return Start(origin=origin, resumed_step=begun, notes=tuple(notes))
    _check_same_training(found, config, data_size)
    state = _read(found)
    if config.ema_decay is None:
        state = without_averages(state)
    elif not holds_averages(state):
        notes.append("the checkpoint has no average of its weights: ema_decay starts from the weights")
    _load(found, backend, state)
    in_place = config.run_dir is not None and found.path.parent.resolve() == _folder(config).resolve()
    if in_place:
        notes += _set_newer_aside(found)
    record = found.record
    if record.config.get("seed") != config.seed:
        notes.append("another seed is another order: of this epoch, some samples come twice and some never")
    return Start(
        origin=f"{found.path}: step {record.step:,}, sample {record.samples:,} (epoch {record.epoch:.2f})",
        progress=Progress(record.step, record.samples),
        record=record,
        resumed_step=record.step if in_place else None,
        changes=tuple(changes(record, config, backend)),
        notes=tuple(notes),
        newest=found.path if in_place else None,
        values=_values(config) if in_place else {},
    )


def changes(record: Record, config: Config, backend: Backend) -> list[str]:
    """Say what is another than when a checkpoint was made: config, number of workers, versions."""
    new = config.model_dump(mode="json")
    pairs = [
        (name, record.config[name], new[name])
        for name in new
        if name in record.config and name not in _NOT_COMPARED
    ]
    pairs.append(("workers", record.workers, backend.workers.size))
    versions = versions_with(backend)
    pairs += [(name, record.versions[name], versions[name]) for name in versions if name in record.versions]
    return [f"{name} {_said(old)} -> {_said(value)}" for name, old, value in pairs if old != value]


def load_weights(found: Checkpoint, backend: Backend, take_averages: bool = True) -> bool:
    """Load a checkpoint's weights; the optimizer stays as it was built. Local: no collective.

    Args:
        found: the checkpoint.
        backend: the backend, built. If it averages weights, it starts from these.
        take_averages: whether to take the averages of the weights, where the checkpoint has them.

    Returns:
        Whether averages were taken.

    Raises:
        CheckpointError: where they do not fit the model.
    """
    own = {name: value for name, value in backend.get_state().items() if checkpoint.is_of_optimizer(name)}
    state = _read(found, weights_only=True)
    taken = take_averages and holds_averages(state)
    _load(found, backend, own | (averaged(state) if taken else without_averages(state)))
    return taken


def _initialise(config: Config, backend: Backend) -> str:
    found = checkpoint.locate(Path(config.init or ""))
    weights = "averaged weights" if load_weights(found, backend) else "weights"
    return f"{weights} of {found.path}, step {found.record.step:,}"


def _folder(config: Config) -> Path:
    return Path(config.run_dir or "") / CHECKPOINTS


def _read(found: Checkpoint, weights_only: bool = False) -> PortableState:
    try:
        return found.read_model() if weights_only else found.read()
    except Damage as damage:
        raise CheckpointError(f"checkpoint {found.path} cannot be read: {damage}") from None


def _load(found: Checkpoint, backend: Backend, state: PortableState) -> None:
    try:
        backend.set_state(state)
    except TaskError as error:
        raise CheckpointError(
            f"checkpoint {found.path}: {error.problem}",
            error.remedy or "To take its weights alone, without the optimizer's state, use --init.",
        ) from None


def _check_same_training(found: Checkpoint, config: Config, data_size: int) -> None:
    remedy = f"To start anew from its weights, use --init {found.path} instead of --resume."
    before = str(found.record.config.get("task"))
    if not same_task(before, config.task):
        raise CheckpointError(
            f"checkpoint {found.path} was trained on task {before}; this job's task is {config.task}", remedy
        )
    if found.record.data_size != data_size:
        raise CheckpointError(
            f"checkpoint {found.path} was trained on {found.record.data_size:,} samples; the training data "
            f"now has {data_size:,}, so its place in the data means nothing",
            remedy,
        )


def same_task(one: str, other: str) -> bool:
    """Whether two tasks have one name, wherever they lie."""
    return _short(one) == _short(other)


def _short(task: str) -> str:
    """Give a task's name without the folder or package that it lies in."""
    place, _, name = task.rpartition(":")
    return f"{Path(place.removesuffix('.py').replace('.', '/')).name}:{name}"


def _set_newer_aside(found: Checkpoint) -> list[str]:
    """Take checkpoints of a later step out of the way: the run is about to go another way."""
    paths = checkpoint.checkpoints_in(found.path.parent)
    newer = [path for path in paths if checkpoint.step_of(path) > found.record.step]
    return [f"checkpoint {path} is of a later step; {checkpoint.set_aside(path)}" for path in newer]


def _values(config: Config) -> dict[Path, float | None]:
    """Give the metric that keep_best names of every checkpoint in the run directory."""
    if config.keep_best is None:
        return {}
    records = {path: checkpoint.read_record(path) for path in checkpoint.checkpoints_in(_folder(config))}
    metric = config.keep_best.metric
    return {path: record.metrics.get(metric) for path, record in records.items() if record is not None}


def _said(value: Any) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)


def with_nan(values: Mapping[str, float | None]) -> dict[str, float]:
    """Give numbers that came through JSON; NaN for one that was not finite."""
    return {name: math.nan if value is None else value for name, value in values.items()}
