"""Where a run starts from: nothing, the weights of a checkpoint, or a checkpoint to continue from."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hvdtrain.backends.base import Backend, trained_parameters
from hvdtrain.backends.choice import Choice
from hvdtrain.backends.portable.initial_values import ema_as_weights, has_ema, without_ema
from hvdtrain.backends.portable.names import OF_LAYERS, is_private
from hvdtrain.backends.portable.partial import Selection, remedy_for_misfits, select
from hvdtrain.backends.records import PortableState, Shapes, StatePart
from hvdtrain.backends.reduction import fitting_state
from hvdtrain.backends.reduction.local_steps import has_outer, without_outer
from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.digest import describe_changes
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote import fetched
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config
from hvdtrain.data.stream import is_place_kept, number_words, samples_words
from hvdtrain.errors import CheckpointError, TaskError
from hvdtrain.jobs.opening import elastic_plan
from hvdtrain.jobs.opening.data_identity import same_field, same_task
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.run_directory.stored import origin_of, resumed_checkpoint
from hvdtrain.session import versions_with
from hvdtrain.storage.files import run_folder
from hvdtrain.storage.text import counted, with_urls
from hvdtrain.training_plan import Progress
from hvdtrain.workers.agreement import run_on_rank_zero
from hvdtrain.workers.wire_types import travels


def load_initial_weights(
    found: Checkpoint, backend: Backend, weights: PortableState | None, choice: Choice
) -> str:
    """Collective. Load weights, or a part of them, into every worker; the rest keeps its initial values.

    Args:
        found: the checkpoint that they were read from.
        backend: the backend, built. If it keeps a moving average, that starts from these.
        weights: the weights on rank 0; not looked at on other ranks.
        choice: which part is loaded.

    Returns:
        A table of what was taken and what was not; empty if all was.

    Raises:
        CheckpointError: If what is chosen does not fit the model.
    """
    expected, shapes = backend.weight_shapes, _shapes(weights or {})
    text = remedy = ""
    if choice.is_all:
        remedy = run_on_rank_zero(backend.workers, lambda: remedy_for_misfits(expected, shapes, choice))
    else:
        selection: Selection = run_on_rank_zero(
            backend.workers, lambda: select(f"checkpoint {found.path}", expected, shapes, choice)
        )
        of_layers = [name for name in weights or {} if _is_chosen_of_layer(name, choice)]
        names = {*selection.names, *of_layers}
        weights = {name: array for name, array in (weights or {}).items() if name in names}
        text = "\n".join([selection.text, *(f"  taken    {name}" for name in of_layers)])
    try:
        part = StatePart.WEIGHTS if choice.is_all else StatePart.SOME_WEIGHTS
        backend.scatter_state(weights, part)
    except TaskError as error:
        raise CheckpointError(
            f"checkpoint {found.path}: {error.problem}",
            "\n".join(filter(None, [error.remedy, remedy])),
            everywhere=True,
        ) from None
    return text


def _is_chosen_of_layer(name: str, choice: Choice) -> bool:
    """Return whether patterns choose what else than variables a Keras layer keeps, such as a vocabulary."""
    path = name.removeprefix(OF_LAYERS)
    return path != name and not choice.reason_against([name, f"model/{path}"])


def _shapes(state: PortableState) -> Shapes:
    """Return the shapes of a model's arrays, without what only one framework reads."""
    return {
        name: tuple(array.shape)
        for name, array in state.items()
        if name.startswith("model/") and not is_private(name)
    }


# fields that say where a run is written or starts from, not what it computes
_MAX_SHOWN = 200  # characters of a value in a note
_NOT_COMPARED = {"run_dir", "resume", "init", "init_only", "init_skip", "track", "track_checkpoints"}


@travels
@dataclass(frozen=True)
class ResumePoint:
    """Where a run starts from, as rank 0 found it.

    Attributes:
        origin: a description of the checkpoint; empty if there is none.
        weights: which of its weights were taken, as a table; empty if all were.
        source: the checkpoint.
        manifest: of the checkpoint that the run continues from, if it does.
        resumed_step: steps done, if the run continues in a directory that has it already.
        changes: what the config has that the checkpoint's had not, as sentences.
        notes: what else to tell the user.
        newest: the newest good checkpoint in the run directory.
        values: value of the metric that keep_best names, by checkpoint in the run directory.
    """

    origin: str = ""
    weights: str = ""
    source: Checkpoint | None = field(default=None, compare=False)
    manifest: Manifest | None = None
    resumed_step: int | None = None
    changes: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    newest: Path | None = None
    values: Mapping[Path, float | None] = field(default_factory=dict)

    @property
    def progress(self) -> Progress:
        """Steps and samples done."""
        return Progress(self.manifest.step, self.manifest.samples) if self.manifest else Progress()

    def best_value(self, config: Config) -> float | None:
        """Return the best of ``values``."""
        best: float | None = None
        for value in self.values.values():
            if config.keep_best is not None and config.keep_best.improves(value, best):
                best = value
        return best


def restore(
    config: Config,
    backend: Backend,
    data_size: int,
    compare_data: Callable[[Checkpoint], list[str]] = lambda _: [],
    check_as_built: Callable[[], None] = lambda: None,
    *,
    is_stream: bool = False,
) -> ResumePoint:
    """Collective. Find where to start from, and load it into every worker's backend.

    Args:
        config: the resolved config.
        backend: the backend, built.
        data_size: samples in the training data.
        compare_data: raises a CheckpointError if the data are not those of the checkpoint that the run
            continues from; returns notes for the user. Rank 0 calls it.
        check_as_built: raises an error if this worker's model or optimizer is not as it was built. Every
            worker calls it before any of them gets a state, if the run continues from no checkpoint.
        is_stream: whether the training data are a stream, whose declared length may be put right.

    Raises:
        CheckpointError: If the checkpoint that was named is missing or damaged, or one does not fit.
        EnvironmentFault: If a checkpoint cannot be read.
    """
    workers = backend.workers
    states: list[PortableState] = []  # rank 0's alone: it does not travel as an object
    point = run_on_rank_zero(
        workers,
        lambda: _find(config, backend, data_size, compare_data, states.append, is_stream=is_stream),
        doing="reading the checkpoint" if config.resume or config.init else "",
    )
    state = states.pop() if states else None
    if point.manifest is None:
        check_as_built()
    source, changed = point.source, list[str]()
    if source is None:
        backend.broadcast_state(0)
    elif point.manifest is None:
        choice = Choice(config.init_only, config.init_skip)
        point = replace(point, weights=load_initial_weights(source, backend, state, choice))
        if choice.is_all and (before := source.manifest.outputs) is not None:
            changed = changed_outputs(source, backend, config, before.averaged)
    else:
        with _misfits_named(source):
            if (trained := source.manifest.trained) is not None:
                count = counted(trained_parameters(backend).follow_trained(trained), "parameter")
                note = f"callbacks have frozen or thawed parameters before the checkpoint: {count} trained"
                point = replace(point, notes=(*point.notes, note))
            backend.scatter_state(state)
        with backend.ema_weights():
            changed = changed_outputs(source, backend, config, config.ema_decay is not None)
    point = replace(point, notes=(*point.notes, *changed))
    if (newest := point.newest) is not None:  # nothing there changes before the state has fitted
        notes = run_on_rank_zero(workers, lambda: _quarantine_newer(newest))
        point = replace(point, notes=(*point.notes, *notes))
    return point


def _find(
    config: Config,
    backend: Backend,
    data_size: int,
    compare_data: Callable[[Checkpoint], list[str]],
    use: Callable[[PortableState], None],
    *,
    is_stream: bool,
) -> ResumePoint:
    """Return where to start from; ``use`` is called with what is to be loaded. Local: done by rank 0."""
    notes: list[str] = []
    found: Checkpoint | None = None
    if config.resume == "auto":
        found, notes = verification.newest_good(_folder(config))
    elif config.resume is not None:
        found = resumed_checkpoint(config)
        notes = found.notes()
    if found is None:
        begun = 0 if config.resume == "auto" else None  # the directory may hold a run without a checkpoint
        point = ResumePoint(resumed_step=begun, notes=tuple(notes))
        return point if config.init is None else _find_weights(config.init, point, use)
    _check_same_training(found, config, data_size, is_stream)
    notes += compare_data(found)
    state = _read(found)
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
    notes += elastic_plan.notes_on_resuming(config, found.manifest.workers, backend.workers.size)
    before = str(found.manifest.config.get("compression"))
    state, said = fitting_state(state, config.compression, before)
    notes += [said] if said else []
    use(state)
    in_place = config.run_dir is not None and found.path.parent.resolve() == _folder(config).resolve()
    manifest = found.manifest
    if manifest.config.get("seed") != config.seed:
        notes.append("another seed is another order: of this epoch, some samples come twice and some never")
    return ResumePoint(
        origin=f"{origin_of(config, found.path)}: step {manifest.step:,}, sample {manifest.samples:,} "
        f"(epoch {manifest.epoch:.2f})",
        source=found,
        manifest=manifest,
        resumed_step=manifest.step if in_place else None,
        changes=tuple(changes(found, config, backend)),
        notes=tuple(notes),
        newest=found.path if in_place else None,
        values=_values(config, manifest.step) if in_place else {},
    )


def _find_weights(init: str, point: ResumePoint, use: Callable[[PortableState], None]) -> ResumePoint:
    """Return the start with the weights of a checkpoint alone; ``use`` is called with them."""
    found = fetched.locate(init)
    state, is_ema = read_weights(found)
    use(state)
    weights = "EMA weights" if is_ema else "weights"
    point = replace(point, notes=(*point.notes, *found.notes()))
    origin = f"{weights} of {with_urls(str(found.path))}, step {found.manifest.step:,}"
    return replace(point, origin=origin, source=found)


def changes(found: Checkpoint, config: Config, backend: Backend) -> list[str]:
    """Return what differs from when a checkpoint was made: config, number of workers, versions."""
    manifest, new = found.manifest, config.model_dump(mode="json")
    pairs = [
        (name, manifest.config[name], new[name])
        for name in new
        if name in manifest.config and name not in _NOT_COMPARED and not same_field(name, found, new)
    ]
    pairs.append(("workers", manifest.workers, backend.workers.size))
    versions = versions_with(backend)
    pairs += [
        (name, manifest.versions[name], versions[name]) for name in versions if name in manifest.versions
    ]
    return [f"{name} {_describe(old)} -> {_describe(value)}" for name, old, value in pairs if old != value]


def read_weights(found: Checkpoint, prefer_ema: bool = True) -> tuple[PortableState, bool]:
    """Read a checkpoint's weights. Local: no collective.

    Args:
        found: the checkpoint.
        prefer_ema: whether to take the moving average of the weights, if the checkpoint has one.

    Returns:
        The weights, and whether they are the moving average.

    Raises:
        CheckpointError: If they cannot be read.
    """
    state = _read(found, weights_only=True)
    taken = prefer_ema and has_ema(state)
    return (ema_as_weights(state) if taken else without_ema(state)), taken


def load_weights(found: Checkpoint, backend: Backend, weights: PortableState | None) -> None:
    """Collective. Load weights into every worker; the optimizer stays as it was built.

    Args:
        found: the checkpoint that they were read from.
        backend: the backend, built. If it keeps a moving average, that starts from these.
        weights: the weights on rank 0; not looked at on other ranks.

    Raises:
        CheckpointError: If they do not fit the model.
    """
    with _misfits_named(found):
        backend.scatter_state(weights, StatePart.WEIGHTS)


def changed_outputs(found: Checkpoint, backend: Backend, config: Config, is_ema: bool) -> list[str]:
    """Collective. Return sentences on how the model computes something else than when it was saved.

    Args:
        found: the checkpoint.
        backend: the backend, with its weights.
        config: the resolved config.
        is_ema: whether the model has the moving average of its weights.
    """
    path = with_urls(str(found.path))
    return describe_changes(found.manifest.outputs, path, backend, config, is_ema)


def _folder(config: Config) -> Path:
    return run_folder(config.run_dir) / CHECKPOINTS


def _read(found: Checkpoint, weights_only: bool = False) -> PortableState:
    try:
        return found.read_model() if weights_only else found.read()
    except CorruptCheckpoint as corruption:
        raise CheckpointError(f"checkpoint {found.path} cannot be read: {corruption}") from None


@contextmanager
def _misfits_named(found: Checkpoint) -> Iterator[None]:
    """Return a context in which a checkpoint is loaded; the error of one that does not fit names it."""
    try:
        yield
    except TaskError as error:
        raise CheckpointError(
            f"checkpoint {found.path}: {error.problem}",
            error.remedy or "To take its weights alone, without the optimizer's state, use --init.",
            everywhere=True,
        ) from None


def _check_same_training(found: Checkpoint, config: Config, data_size: int, is_stream: bool) -> None:
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


def _quarantine_newer(than: Path) -> list[str]:
    """Take checkpoints of a later step out of the way: the run is about to go another way."""
    paths = storage.checkpoints_in(than.parent)
    newer = [path for path in paths if storage.step_of(path) > storage.step_of(than)]
    return [f"checkpoint {path} is of a later step; {storage.quarantine(path)}" for path in newer]


def _values(config: Config, last_step: int) -> dict[Path, float | None]:
    """Return the metric that keep_best names of every checkpoint in the run directory up to a step."""
    if config.keep_best is None:
        return {}
    paths = [p for p in storage.checkpoints_in(_folder(config)) if storage.step_of(p) <= last_step]
    manifests = {path: verification.read_manifest(path) for path in paths}
    metric = config.keep_best.metric
    return {
        path: manifest.metrics.get(metric) for path, manifest in manifests.items() if manifest is not None
    }


def _describe(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:g}"
    text = "none" if value is None else str(value)
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."
