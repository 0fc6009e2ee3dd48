"""What a job takes from a checkpoint: the config of the training that made it, and its weights."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hvdtrain.backends.base import Backend
from hvdtrain.backends.portable.initial_values import ema_as_weights, has_ema, without_ema
from hvdtrain.backends.portable.names import OF_LAYERS, is_private
from hvdtrain.backends.portable.partial import REMEDY, Choice, select
from hvdtrain.backends.records import PortableState, StatePart
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.digest import describe_changes
from hvdtrain.checkpoints.manifest import CorruptCheckpoint, Manifest
from hvdtrain.checkpoints.remote import stored_checkpoints
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config, Layer
from hvdtrain.errors import CheckpointError, TaskError, UsageError
from hvdtrain.host.launcher import is_elastic, launched_rank
from hvdtrain.jobs.opening.data_identity import same_task
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.storage.text import with_urls
from hvdtrain.task import built_in_names
from hvdtrain.workers.agreement import run_on_rank_zero

# where a run was written, started from, when it stopped and which of its checkpoints it kept; what only
# its loss had, perhaps another task's; the global batch, which may have fewer samples than there are
# workers now, with the learning rate and its schedule; and the device, the threads and the
# processes that it read and computed with, perhaps on a larger machine
_OF_TRAINING = {
    *("run_dir", "resume", "init", "init_only", "init_skip", "keep_best", "early_stopping"),
    *("label_smoothing", "mixup", "cutmix", "compression", "overlap", "shard"),
    *("stages", "stage_cuts"),
    *("global_batch_size", "accumulate", "batch_size", "learning_rate"),
    *("lr_schedule", "warmup_epochs", "warmup_steps", "lr_final_fraction", "plateau_metric"),
    *("device", "threads", "read_threads", "read_workers"),
    *("sync_every", "outer_optimizer"),
    *("on_changed_data", "profile", "track", "track_checkpoints"),  # chosen for one job
}
# of these, what a task has by default could refuse an evaluation or change what it does
_NOT_BY_DEFAULT = (
    *("global_batch_size", "accumulate"),
    *("sync_every", "outer_optimizer", "compression", "overlap", "shard", "stages", "stage_cuts"),
    *("profile", "track"),
)
_MAX_SHOWN = 500  # characters of a task's name


def find_unverified(path: Path | str) -> Checkpoint:
    """Find what a user names, a checkpoint or a run's newest, by its manifest alone. Local: no collective."""
    if isinstance(path, str):
        return stored_checkpoints.find_unverified(path)
    candidates = [path]
    for folder in (path / CHECKPOINTS, path):
        with suppress(OSError):
            candidates += reversed(storage.checkpoints_in(folder))
    for candidate in candidates:
        manifest = storage.read_manifest(candidate)
        if manifest is not None:
            return Checkpoint(candidate, manifest)
    try:
        return storage.locate(path)
    except CheckpointError as error:
        if launched_rank() is not None or is_elastic():
            shared = "Every worker reads the checkpoint: each host needs it, under this path."
            error = CheckpointError(error.problem, f"{shared} {error.remedy}".strip())
        raise error from None


def verified(path: Path | str, expected: Manifest) -> Checkpoint:
    """Check every byte of the checkpoint that a user names. Local: no collective."""
    found = stored_checkpoints.locate(path)
    if found.manifest.config != expected.config:
        raise CheckpointError(
            f"the newest checkpoint of {path} is damaged; the one before it, {found.path.name}, was trained "
            "with another config",
            f"To use that one, name it: {found.path}",
        )
    return found


def layers_of(found: Checkpoint, given: list[Layer]) -> list[Layer]:
    """Return a job's config layers, weakest first: the checkpoint's, then those that the user gave."""
    # Evaluation keeps the samples per worker and batch that it had in training.
    config = found.manifest.config
    merged = {name: value for layer in given for name, value in layer.values.items()}
    trained_on, task = str(config.get("task")), merged.get("task")
    if task is None and trained_on not in built_in_names():
        # a name of somebody else's may hold what controls the terminal
        shown = (trained_on if trained_on.isprintable() else ascii(trained_on))[:_MAX_SHOWN]
        raise UsageError(
            f"checkpoint {found.path} was trained on the task {shown}, which is not built in; "
            "it runs only if you name it",
            f"If you trust it, add: --task {shlex.quote(shown)}",
        )
    values = {name: config[name] for name in config if name in Config.model_fields.keys() - _OF_TRAINING}
    # nor those of the task's defaults
    values |= {name: Config.model_fields[name].default for name in _NOT_BY_DEFAULT}
    for name in ("batch_size", "global_batch_size", "accumulate", "eval_batch_size"):
        if not isinstance(value := config.get(name), int | None):
            raise CheckpointError(
                f"checkpoint {found.path}: {name} in its config must be a whole number, found {value!r}",
                "Its trainer.json was not written by hvdtrain; do not use it.",
            )
    micro_batch = config.get("batch_size") or Config.model_fields["batch_size"].default
    if (total := config.get("global_batch_size")) is not None:
        micro_batch = -(-total // (found.manifest.workers * (config.get("accumulate") or 1)))
    values["eval_batch_size"] = config.get("eval_batch_size") or micro_batch
    values["initial_parameters"] = "model"  # they are about to be replaced
    # training's optimizer and its options: one that keeps nothing
    values |= {"optimizer": "sgd", "momentum": 0.0, "parameter_groups": []}
    if task is not None and not same_task(trained_on, str(task)):
        values.pop("task_options", None)  # they are another constructor's
    return [Layer(f"checkpoint {found.path}", values), *given]


def read_weights(found: Checkpoint, prefer_ema: bool = True) -> tuple[PortableState, bool]:
    """Return a checkpoint's weights, and whether they are the moving average. Local: no collective."""
    state = read_checkpoint(found, weights_only=True)
    taken = prefer_ema and has_ema(state)
    return (ema_as_weights(state) if taken else without_ema(state)), taken


def load_initial_weights(
    found: Checkpoint, backend: Backend, weights: PortableState | None, choice: Choice
) -> str:
    """Collective. Load weights, or a part of them, into every worker; the rest keeps its initial values."""
    # Return a table of what was taken and what was not; empty if all was.
    text, arrays = "", (weights or {}).items()
    # without what only one framework reads
    shapes = {n: tuple(a.shape) for n, a in arrays if n.startswith("model/") and not is_private(n)}
    if not choice.is_all:
        taken, table = run_on_rank_zero(
            backend.workers,
            lambda: select(f"checkpoint {found.path}", backend.weight_shapes, shapes, choice),
        )
        # what else than variables a Keras layer keeps, such as a vocabulary
        paths = {name: name.removeprefix(OF_LAYERS) for name, _ in arrays if name.startswith(OF_LAYERS)}
        of_layers = [n for n, path in paths.items() if not choice.reason_against(n, f"model/{path}")]
        names = {*taken, *of_layers}
        weights = {name: array for name, array in arrays if name in names}
        text = "\n".join([table, *(f"  taken    {name}" for name in of_layers)])
    try:
        part = StatePart.WEIGHTS if choice.is_all else StatePart.SOME_WEIGHTS
        backend.scatter_state(weights, part)
    except TaskError as error:
        raise CheckpointError(
            f"checkpoint {found.path}: {error.problem}",
            f"{error.remedy}\n{REMEDY}" if choice.is_all else error.remedy,
            everywhere=True,
        ) from None
    return text


def changed_outputs(found: Checkpoint, backend: Backend, config: Config, is_ema: bool) -> list[str]:
    """Collective. Return sentences on how the model computes something else than when it was saved."""
    path = with_urls(str(found.path))
    return describe_changes(found.manifest.outputs, path, backend, config, is_ema)


def read_checkpoint(found: Checkpoint, weights_only: bool = False) -> PortableState:
    """Read a checkpoint's arrays. Local: no collective."""
    try:
        return found.read_model() if weights_only else found.read()
    except CorruptCheckpoint as corruption:
        raise CheckpointError(f"checkpoint {found.path} cannot be read: {corruption}") from None


@contextmanager
def misfits_named(found: Checkpoint) -> Iterator[None]:
    """Return a context in which a checkpoint is loaded; the error of one that does not fit names it."""
    try:
        yield
    except TaskError as error:
        raise CheckpointError(
            f"checkpoint {found.path}: {error.problem}",
            error.remedy or "To take its weights alone, without the optimizer's state, use --init.",
            everywhere=True,
        ) from None
