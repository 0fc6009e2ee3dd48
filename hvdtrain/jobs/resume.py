"""Where a run starts from: nothing, the weights of a checkpoint, or a checkpoint to continue from."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.portable.initial_values import has_ema, without_ema
from hvdtrain.backends.portable.partial import Choice
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.reduction import fitting_state
from hvdtrain.backends.reduction.local_steps import has_outer, without_outer
from hvdtrain.backends.trained_set import refused
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.remote import stored_checkpoints
from hvdtrain.checkpoints.storage import Checkpoint, step_of
from hvdtrain.config import Config
from hvdtrain.data.stream import Stream, is_place_kept, number_words, samples_words
from hvdtrain.errors import CheckpointError, EnvironmentFault
from hvdtrain.jobs.opening import checkpoint_config
from hvdtrain.jobs.opening.data_identity import compare_with_checkpoint, same_field, same_task
from hvdtrain.jobs.opening.setup import TrainingRun
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS, claim_run, resumes_in_place
from hvdtrain.jobs.serving.checkpoint import chosen_checkpoint
from hvdtrain.session import location_of, versions_with
from hvdtrain.storage.files import run_folder
from hvdtrain.storage.text import counted, with_urls
from hvdtrain.storage.urls import shown
from hvdtrain.training_plan import Progress
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import run_on_rank_zero
from hvdtrain.workers.wire_types import travels

_MAX_SHOWN = 200  # characters of a value in a note
# fields that say where a run is written, sent to or starts from, not what it computes
_NOT_COMPARED = {"run_dir", "resume", "init", "init_only", "init_skip", "track", "track_checkpoints"}


@travels
@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts from, as rank 0 found it."""

    origin: str = ""  # a description of the checkpoint; empty if there is none
    weights: str = ""  # which of its weights were taken, as a table; empty if all were
    source: Checkpoint | None = field(default=None, compare=False)  # the checkpoint
    manifest: Manifest | None = None  # of the checkpoint that the run continues from, if it does
    resumed_step: int | None = None  # steps done, if the run continues in a directory that has it already
    changes: tuple[str, ...] = ()  # what the config has that the checkpoint's had not, as sentences
    notes: tuple[str, ...] = ()  # what else to report to the user
    newest: Path | None = None  # the newest good checkpoint in the run directory
    # value of the metric that keep_best names, by checkpoint in the run directory
    values: Mapping[Path, float | None] = field(default_factory=dict)

    @property
    def progress(self) -> Progress:
        """Steps and samples done."""
        return Progress(self.manifest.step, self.manifest.samples) if self.manifest else Progress()

    def best_value(self, config: Config) -> float | None:
        """Return the best of ``values``."""
        best = None if config.keep_best is None else config.keep_best.best_of(self.values)
        return None if best is None else self.values[best]


def restore(run: TrainingRun, is_as_built: bool = True) -> ResumePoint:
    """Collective. Find where to start from, and load it into every worker's backend."""
    config, backend = run.config, run.backend
    states: list[PortableState] = []  # rank 0's alone: it does not travel as an object
    doing = "reading the checkpoint" if config.resume or config.init else ""
    point = run_on_rank_zero(backend.workers, lambda: _find(run, states.append), doing)
    state = states.pop() if states else None
    if point.manifest is None and not is_as_built:
        raise EnvironmentFault(
            "training starts anew, and model and optimizer of this worker are of an earlier start",
            "The driver of the job starts another worker in its place.",
        )
    source, weights, notes = point.source, "", list(point.notes)
    if source is None:
        backend.broadcast_state(0)
    elif point.manifest is None:
        choice = Choice(config.init_only, config.init_skip)
        weights = checkpoint_config.load_initial_weights(source, backend, state, choice)
        if choice.is_all and (before := source.manifest.outputs) is not None:
            notes += checkpoint_config.changed_outputs(source, backend, config, before.averaged)
    else:
        with checkpoint_config.misfits_named(source):
            if (trained := source.manifest.trained) is not None:
                if backend.step.is_own:
                    raise refused(
                        "callbacks froze or thawed parameters, which the task's own step does not follow",
                        "Decide within torch_step() or tf_step() which losses and optimizers are used.",
                    )
                count = counted(backend.follow_trained(trained), "parameter")
                notes.append(
                    f"callbacks have frozen or thawed parameters before the checkpoint: {count} trained"
                )
            backend.scatter_state(state)
        with backend.ema_weights():
            notes += checkpoint_config.changed_outputs(source, backend, config, config.ema_decay is not None)
    if (newest := point.newest) is not None:  # nothing there changes before the state has fitted
        later = partial(storage.quarantine_later, newest.parent, storage.step_of(newest))
        notes += run_on_rank_zero(backend.workers, later)
    return replace(point, weights=weights, notes=tuple(notes))


def _find(run: TrainingRun, use: Callable[[PortableState], None]) -> ResumePoint:
    """Return where to start from; ``use`` is called with what is to be loaded. Local: done by rank 0."""
    config, notes = run.config, list[str]()
    found: Checkpoint | None = None
    if config.resume == "auto":
        found, notes = storage.newest_good(_folder(config))
    elif config.resume is not None:
        # rank 0 has fetched, or fetches, one at a URL
        place = run_folder(config.run_dir) if resumes_in_place(config) else config.resume
        found = stored_checkpoints.locate(place)
        notes = found.notes()
    if found is not None:
        return _continued(run, found, notes, use)
    begun = 0 if config.resume == "auto" else None  # the directory may hold a run without a checkpoint
    if config.init is None:
        return ResumePoint(resumed_step=begun, notes=tuple(notes))
    found = stored_checkpoints.locate(chosen_checkpoint(config.init, run.job.best))
    state, is_ema = checkpoint_config.read_weights(found)
    use(state)
    what = "EMA weights" if is_ema else "weights"
    origin = f"{what} of {with_urls(str(found.path))}, step {found.manifest.step:,}"
    return ResumePoint(origin, source=found, resumed_step=begun, notes=(*notes, *found.notes()))


def _continued(
    run: TrainingRun, found: Checkpoint, notes: list[str], use: Callable[[PortableState], None]
) -> ResumePoint:
    """Return a checkpoint as the point to continue from. Local."""
    config, backend, data = run.config, run.backend, run.task_data
    _check_same_training(found, config, data.train_data)
    notes += compare_with_checkpoint(found, data.identity, config)
    manifest, goal = found.manifest, config.keep_best
    if config.sync_every is not None and manifest.workers != backend.workers.size:
        notes.append(
            "local steps: the result depends on the number of workers, which was "
            f"{manifest.workers} and is {backend.workers.size}"
        )
    use(_state_for(found, config, notes))
    in_place = config.run_dir is not None and found.path.parent.resolve() == _folder(config).resolve()
    if manifest.config.get("seed") != config.seed:
        notes.append("another seed is another order: of this epoch, some samples come twice and some never")
    values: Mapping[Path, float | None] = {}
    if goal and in_place:
        values = storage.values_in(_folder(config), goal.metric, manifest.step)
    return ResumePoint(
        origin=f"{shown(location_of(config, found.path))}: step {manifest.step:,}, sample "
        f"{manifest.samples:,} (epoch {manifest.epoch:.2f})",
        source=found,
        manifest=manifest,
        resumed_step=manifest.step if in_place else None,
        changes=tuple(changes(found, config, backend)),
        notes=tuple(notes),
        newest=found.path if in_place else None,
        values=values,
    )


def _state_for(found: Checkpoint, config: Config, notes: list[str]) -> PortableState:
    """Return a checkpoint's state with the averages and momenta that this job uses; add notes on them."""
    state = checkpoint_config.read_checkpoint(found)
    if config.ema_decay is None:
        state = without_ema(state)
    elif not has_ema(state):
        notes.append("the checkpoint has no average of its weights: ema_decay starts from the weights")
    if config.outer_optimizer != "nesterov":
        if has_outer(state):
            notes.append("the momentum of the outer optimizer nesterov is dropped: this job does not use it")
        state = without_outer(state)
    elif not has_outer(state):
        notes.append("the checkpoint has no momentum of an outer optimizer: it starts from zero")
    before = str(found.manifest.config.get("compression"))
    state, of_compression = fitting_state(state, config.compression, before)
    notes += filter(None, [of_compression])
    return state


def changes(found: Checkpoint, config: Config, backend: Backend) -> list[str]:
    """Return what differs from when a checkpoint was made: config, number of workers, versions."""
    manifest, new, versions = found.manifest, config.model_dump(mode="json"), versions_with(backend)
    pairs = [
        (name, manifest.config[name], new[name])
        for name in new
        if name in manifest.config and name not in _NOT_COMPARED and not same_field(name, found, new)
    ]
    pairs.append(("workers", manifest.workers, backend.workers.size))
    pairs += [(name, old, versions[name]) for name, old in manifest.versions.items() if name in versions]
    return [f"{name} {_describe(old)} -> {_describe(value)}" for name, old, value in pairs if old != value]


def _folder(config: Config) -> Path:
    return run_folder(config.run_dir) / CHECKPOINTS


def _check_same_training(found: Checkpoint, config: Config, train_data: Any) -> None:
    data_size, is_stream = len(train_data), isinstance(train_data, Stream)
    remedy = f"To start anew from its weights, use --init {found.path} instead of --resume."
    before = str(found.manifest.config.get("task"))
    if not same_task(before, config.task):
        raise CheckpointError(
            f"checkpoint {found.path} was trained on task {before}; this job's task is {config.task}", remedy
        )
    size, samples = found.manifest.data_size, found.manifest.samples
    if size != data_size and not (is_stream and is_place_kept(samples, size, data_size)):
        raise CheckpointError(
            f"checkpoint {found.path} was trained on {samples_words(size)}; the training "
            f"data now has {number_words(data_size)}, so its place in the data means nothing",
            remedy,
        )


def _describe(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = "none" if value is None else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def find_start(run: TrainingRun, is_as_built: bool = True) -> ResumePoint:
    """Collective. Find where to start from, load it into every worker, return it with all notes so far."""
    config, workers, store = run.config, run.backend.workers, run.store
    of_store = claim_run(config, workers, run.lock, store)
    ACTIVITY.enter("reading the checkpoint", is_long=True)
    point = restore(run, is_as_built)
    if config.keep_best is not None and store is not None and point.resumed_step is not None:
        folder = _folder(config)
        stored = {folder / name: value for name, value in store.values(config.keep_best.metric).items()}
        earlier = {path: value for path, value in stored.items() if step_of(path) <= point.resumed_step}
        point = replace(point, values={**earlier, **point.values})
    return replace(point, notes=(*of_store, *run.notes(), *point.notes))
