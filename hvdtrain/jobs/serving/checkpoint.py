"""Opening the data that a checkpoint is evaluated on or predicts."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.backends.base import Backend, model_files
from hvdtrain.backends.choice import ALL_WEIGHTS, Choice
from hvdtrain.checkpoints import storage, verification
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.remote.fetched import manifests_in
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config, Layer
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import CheckpointError, DataError, EnvironmentFault, HvdtrainError, TaskError, UsageError
from hvdtrain.host.output import quiet_output
from hvdtrain.jobs.opening.data_identity import (
    SAME_DATA,
    JobData,
    identify_data,
    is_changed,
    keyed,
    words_for,
)
from hvdtrain.jobs.opening.data_sets import align_columns
from hvdtrain.jobs.opening.setup import build, new_task, open_data, open_task_data
from hvdtrain.jobs.opening.start import JobSpec, check_alone, prepare, started
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.jobs.serving.outputs import Place, local_file
from hvdtrain.jobs.signals import interruptible
from hvdtrain.session import versions_with
from hvdtrain.storage.urls import shown
from hvdtrain.workers.agreement import assert_consistent
from hvdtrain.workers.seeding import seeded_frameworks


def chosen_checkpoint(path: Path | str, best: bool | str) -> Path | str:
    """Return the path to look for a checkpoint at. Local: no collective.

    Args:
        path: a checkpoint, or a run; or the URL of one.
        best: whether to take the best checkpoint of the run, and by which metric: True for the one that the
            run kept the best of, or else the loss.

    Returns:
        ``path``, or the directory of the best checkpoint in it; of equal ones the first.

    Raises:
        UsageError: If ``best`` is no metric.
        CheckpointError: If no checkpoint there has an evaluation with that metric.
    """
    if not best:
        return path
    manifests = _manifests_in(path)
    goal = _goal(best, next(reversed([*manifests.values()]), None))
    value: float | None = None
    found: Path | str | None = None
    for candidate, manifest in manifests.items():
        if goal.improves(manifest.metrics.get(goal.metric), value):
            value, found = manifest.metrics[goal.metric], candidate
    if found is None:
        names = sorted({name for manifest in manifests.values() for name in manifest.metrics})
        raise CheckpointError(
            f"best: no checkpoint in {path} has an evaluation with the metric {goal.metric!r}",
            f"Metrics that they have: {', '.join(names)}."
            if names
            else "A checkpoint has one if it was saved at a step with an evaluation; keep_best saves those.",
        )
    return found


def _manifests_in(path: Path | str) -> Mapping[Any, Manifest]:
    """Return what the checkpoints of a run say of themselves, the newest last; damaged ones are left out."""
    if isinstance(path, str):
        return manifests_in(path)
    try:
        paths = [*storage.checkpoints_in(path / CHECKPOINTS), *storage.checkpoints_in(path)]
    except OSError as error:
        raise EnvironmentFault(f"cannot read {path}: {error.strerror or error}") from None
    found = {one: verification.read_manifest(one) for one in paths}
    return {one: manifest for one, manifest in found.items() if manifest is not None}


def _goal(best: bool | str, newest: Manifest | None) -> MetricGoal:
    """Return the metric that says which checkpoint is best.

    Raises:
        UsageError: If it is none.
    """
    if best is True:
        best = str((newest and newest.config.get("keep_best")) or "loss")
    if not isinstance(best, str):
        raise UsageError(f"best must be True, False or the name of a metric, found {best!r}")
    try:
        return MetricGoal.parse(best)
    except ValueError as error:
        raise UsageError(f"best={best!r}: {error}") from None


# ending of a file's name: the framework that saves such files
_FILE_ENDINGS = {
    ".pt": "torch",
    ".pth": "torch",
    ".safetensors": "torch",
    ".weights.h5": "tf",
    ".keras": "tf",
}

_TO_UPLOAD = (
    "Copy it to the store with the store's own client: model.safetensors and optimizer.safetensors first."
)


@dataclass(frozen=True)
class Imported:
    """Weights that became a checkpoint."""

    source: Place  # the file, or its URL
    held: str  # what it held, in words
    path: Path  # the checkpoint
    config: Config  # the config that the model was built with

    def describe(self) -> str:
        """Return what was read and how to continue."""
        return (
            f"read {shown(self.source)}: {self.held}\n"
            f"checkpoint: {self.path}\n"
            f"to train from it: python -m hvdtrain --framework {self.config.framework} "
            f"--task {self.config.task} --init {self.path.parent}"
        )


def import_file(
    path: Place,
    given: list[Layer],
    output: Place,
    choice: Choice = ALL_WEIGHTS,
    *,
    task_class: Any = None,
    from_python: bool = False,
) -> Imported:
    """Make a checkpoint of a framework's own file of weights: step 0, with a fresh optimizer.

    One worker. Nothing in the file is executed.

    Args:
        path: a state_dict of PyTorch (.pt, .pth, .safetensors), or weights of Keras (.weights.h5, .keras);
            or the URL of one.
        given: the user's config layers, weakest first.
        output: the folder that the checkpoint goes into; holds none yet.
        choice: which part of the file is taken; the rest of the model has its initial values.
        task_class: the task's class if the caller has it.
        from_python: whether a script called: then Horovod stays if the import fails.

    Raises:
        CheckpointError: If the file is missing, damaged, needs code to be run, or does not fit.
        UsageError: If its kind is unknown or another framework's, or ``output`` has checkpoints.
        EnvironmentFault: If the file cannot be fetched, or the checkpoint not be written.
    """
    if isinstance(output, str):
        raise UsageError(
            f"--output {shown(output)}: the checkpoint is written to a directory of this host", _TO_UPLOAD
        )
    with local_file(path) as file:
        done = _import(file, given, output, choice, task_class=task_class, from_python=from_python)
    return replace(done, source=path)


def _import(
    path: Path, given: list[Layer], output: Path, choice: Choice, *, task_class: Any, from_python: bool
) -> Imported:
    if not path.is_file():
        raise CheckpointError(f"there is no file {path} (looked in {Path.cwd()})")
    framework = _framework_of(path)
    if storage.checkpoints_in(output) or storage.checkpoints_in(output / CHECKPOINTS):
        raise UsageError(f"--output {output} has checkpoints already", "Give another folder.")
    with interruptible() as signals, seeded_frameworks():
        job = prepare([Layer(path.name, {"framework": framework, "device": "cpu"}), *given], task_class)
        if job.config.framework != framework:
            raise UsageError(
                f"{path.name} is a file of --framework {framework}, not of {job.config.framework}",
                "A checkpoint fits both: import it with that one, then train with the other.",
            )
        with started(job, signals, stays=from_python) as backend:
            check_alone(backend, "import")
            held, made = _make(job, backend, path, output, choice)
    return Imported(path, held, made, job.config)


def _framework_of(path: Path) -> str:
    for suffix, framework in _FILE_ENDINGS.items():
        if path.name.endswith(suffix):
            return framework
    raise UsageError(f"{path.name}: of what kind is it?", f"Known endings: {', '.join(_FILE_ENDINGS)}.")


def _make(job: JobSpec, backend: Backend, path: Path, output: Path, choice: Choice) -> tuple[str, Path]:
    """Build the model, load the file and write the checkpoint; return what was loaded, and its directory."""
    task_data = open_task_data(job)
    build(job.config, task_data.task, backend)
    with quiet_output():
        held = model_files(backend).load_weights_file(path, choice)
    try:
        pending = backend.gather_state()
        assert pending is not None  # this is the only worker
        output.parent.mkdir(parents=True, exist_ok=True)
        made = storage.write(output, pending.read(), _manifest(job, backend, task_data.train_data))
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output}: {error.strerror or error}") from None
    return held, made


def _manifest(job: JobSpec, backend: Backend, train_data: Any) -> Manifest:
    return Manifest(
        step=0,
        samples=0,
        data_size=len(train_data),
        seconds=0.0,
        workers=1,
        config=job.config.model_dump(mode="json"),
        versions=versions_with(backend),
    )


def open_checkpoint_data(
    job: JobSpec, backend: Backend, found: Checkpoint, method: str = ""
) -> tuple[Any, Any, JobData]:
    """Collective. Make the task and open some of its data, with the checks of both.

    If the data are not those of the checkpoint, the training data are opened before: a task may draw
    its split when it opens them.

    Args:
        job: the job.
        backend: the backend.
        found: the checkpoint.
        method: "train_data", "eval_data" or "predict_data"; if empty, "predict_data" if the task has it, else
            "eval_data".

    Returns:
        The task, the data, of several sets as EvalSets, and the data sets with their fingerprints.

    Raises:
        DataError: If the task has no such data.
    """
    opened = _open(job, backend, found, method)
    if any(backend.workers.allgather_object(is_changed(found.manifest.data, opened[2]))):
        opened = _open(job, backend, found, method, training_first=True)
    return opened


def _open(
    job: JobSpec, backend: Backend, found: Checkpoint, method: str, training_first: bool = False
) -> tuple[Any, Any, JobData]:
    """Collective. Make the task and open the data, perhaps after the training data, as training does."""
    try:
        task, method, data, values = _open_alone(job, method, training_first)
    except TaskError:
        if training_first:
            raise
        task, method, data, values = _open_alone(job, method, training_first=True)
    assert_consistent(backend.workers, values, SAME_DATA)
    if data is None:
        raise DataError(
            f"{method}() of task {job.config.task} gave None: there are no samples",
            "Give the task such data, or name other data.",
            everywhere=True,
        )
    trained = found.manifest.data.get("train_data")
    opened = {words_for(key): dataset for key, dataset in keyed(method, data).items()}
    notes = align_columns(opened, trained.columns if trained else {}, "the checkpoint's training data")
    identity = identify_data(backend.workers, {method: data}, job.config)
    return task, data, replace(identity, notes=(*identity.notes, *notes))


def _open_alone(job: JobSpec, method: str, training_first: bool) -> tuple[Any, str, Any, dict[str, Any]]:
    """Make the task and open the data. Local: no collective."""
    task = new_task(job)
    method = method or ("predict_data" if hasattr(task, "predict_data") else "eval_data")
    if not hasattr(task, method):
        raise DataError(f"task {job.config.task} has no {method}()", "Use another --split.", everywhere=True)
    if training_first:
        with suppress(HvdtrainError):  # they may not be there
            open_data(task, job.config, "train_data")
    return task, method, *open_data(task, job.config, method)
