"""The opening of evaluate, predict, load and export: a checkpoint, its job, data and weights; its outputs."""

import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.backends.records import PortableState, StatePart
from hvdtrain.checkpoints import storage
from hvdtrain.checkpoints.manifest import Manifest
from hvdtrain.checkpoints.remote.stored_checkpoints import manifests_in
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config, Layer
from hvdtrain.data.training_data import TrainingData
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import CheckpointError, DataError, EnvironmentFault, HvdtrainError, TaskError, UsageError
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.compatibility import Job, check
from hvdtrain.jobs.failures import end_if_uncaught, interruptible
from hvdtrain.jobs.opening.checkpoint_config import (
    changed_outputs,
    find_unverified,
    layers_of,
    misfits_named,
    read_weights,
    verified,
)
from hvdtrain.jobs.opening.data_identity import (
    NO_DATA,
    SAME_DATA,
    JobData,
    compare_with_checkpoint,
    identify_data,
    is_changed,
    keyed,
    words_for,
)
from hvdtrain.jobs.opening.data_sets import align_columns, streams_of
from hvdtrain.jobs.opening.setup import build_together, new_task, open_data
from hvdtrain.jobs.opening.start import JobSpec, check_alone, handshake, prepare, started
from hvdtrain.jobs.run_directory.folder import CHECKPOINTS
from hvdtrain.reporting.report import Report
from hvdtrain.session import RunState, Services, Session
from hvdtrain.storage.files import check_url, expand_path
from hvdtrain.storage.urls import is_url, shown
from hvdtrain.task import task_class_of, task_spec
from hvdtrain.training_plan import Progress
from hvdtrain.workers.agreement import assert_consistent, run_on_rank_zero
from hvdtrain.workers.seeding import seeded_frameworks

PathOrUrl = Path | str  # the text is a URL
_MOST_NAME_BYTES = 200  # of a file's name, in addition to which there are others with longer ones


@dataclass(frozen=True)
class Call:
    """A checkpoint, or a file of weights, and the config that a user gives for it."""

    place: PathOrUrl  # a checkpoint, or a run for its newest good one; or the URL of one
    given: Sequence[Layer]  # the user's config layers, weakest first
    task_class: Any = None  # the task's class if the caller has it
    from_python: bool = False  # whether a script called: then Horovod stays if all workers fail

    @classmethod
    def of(
        cls,
        function: str,
        place: str | Path,
        task: Any,
        fields: Mapping[str, Any],
        *,
        framework: str | None = None,
        best: bool | str = False,
    ) -> "Call":
        """Return the call of a function from Python, whose arguments ``hvdtrain.evaluate`` describes."""
        end_if_uncaught()
        named = {"task": None if task is None else task_spec(task), "framework": framework}
        values = {**fields, **{name: value for name, value in named.items() if value is not None}}
        found = chosen_checkpoint(given_path(place, "checkpoint "), best)
        return cls(found, [Layer(f"{function}()", values)], task_class_of(task), from_python=True)


def given_path(text: str | Path, what: str = "") -> PathOrUrl:
    """Return a path or URL as a user gave it, with ``~`` and variables replaced."""
    try:
        expanded = expand_path(str(text))
        return check_url(expanded) if is_url(expanded) else Path(expanded)
    except ValueError as error:
        raise UsageError(f"{what}{shown(text)}: {error}") from None


def given_output(text: str | Path) -> Path:
    """Return the path of what is to be written, likewise; raises a UsageError also if it is a URL."""
    place = given_path(text)
    if isinstance(place, str):
        raise UsageError(f"{shown(place)} is a URL; a path of this host is needed here")
    return place


@contextmanager
def opened(
    call: Call,
    command: str,
    fields: Mapping[str, Any] = MappingProxyType({}),
    *,
    fixed: Sequence[Layer] = (),
    is_alone: bool = False,
) -> Iterator[tuple[JobSpec, Backend, Checkpoint]]:
    """Collective. Return a context with a job for a checkpoint, its backend and the unverified checkpoint."""
    with interruptible() as signals, seeded_frameworks():
        found = find_unverified(call.place)
        layers = layers_of(found, [Layer(command, fields), *call.given])
        job = prepare([*layers, *fixed], call.task_class)
        check(Job(job.config, command=command))
        with started(job, signals, stays=call.from_python) as backend, signals.signals_take_precedence():
            if is_alone:
                check_alone(backend, command)
            yield job, backend, found


def show(text: str, notes: Iterable[str] = ()) -> None:
    """Show what was done, if anything was, and what else the user should know."""
    console = open_console()
    if text:
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    for note in notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True, style="yellow")


def chosen_checkpoint(path: Path | str, best: bool | str) -> Path | str:
    """Return the path to look for a checkpoint at: of equally good ones the first. Local: no collective."""
    if not best:
        return path
    if is_url(path):
        manifests: Mapping[Any, Manifest] = manifests_in(str(path))
    else:
        folder = Path(path)
        try:
            paths = [*storage.checkpoints_in(folder / CHECKPOINTS), *storage.checkpoints_in(folder)]
        except OSError as error:
            raise EnvironmentFault(f"cannot read {path}: {error.strerror or error}") from None
        read = {one: storage.read_manifest(one) for one in paths}
        manifests = {one: manifest for one, manifest in read.items() if manifest}  # damaged ones are left out
    if best is True:
        newest = next(reversed([*manifests.values()]), None)
        best = str((newest and newest.config.get("keep_best")) or "loss")
    if not isinstance(best, str):
        raise UsageError(f"best must be True, False or the name of a metric, found {best!r}")
    try:
        goal = MetricGoal.parse(best)
    except ValueError as error:
        raise UsageError(f"best={best!r}: {error}") from None
    values = {candidate: manifest.metrics.get(goal.metric) for candidate, manifest in manifests.items()}
    found: Path | str | None = goal.best_of(values)
    if found is None:
        names = sorted({name for manifest in manifests.values() for name in manifest.metrics})
        raise CheckpointError(
            f"best: no checkpoint in {path} has an evaluation with the metric {goal.metric!r}",
            f"Metrics that they have: {', '.join(names)}."
            if names
            else "A checkpoint has one if it was saved at a step with an evaluation; keep_best saves those.",
        )
    return found


@dataclass(frozen=True)
class OpenRun:
    """A checkpoint's model with its weights, and a run that only goes over data and reports nothing."""

    task: Any
    name: str  # the name of the data, or of the first set of several
    session: Session
    found: Checkpoint  # verified
    is_ema: bool  # whether the weights are their moving average
    notes: tuple[str, ...]


def open_run(
    job: JobSpec,
    backend: Backend,
    place: PathOrUrl,
    unverified: Checkpoint,
    method: str,
    *,
    one_set: bool = False,
) -> OpenRun:
    """Collective. Agree, open some of the task's data, build the model and load the weights."""
    handshake(job, backend)
    task, data, identity = _open(job, backend, unverified, method)
    # a task may draw its split when it opens the training data
    if any(backend.workers.allgather_object(is_changed(unverified.manifest.data, identity))):
        task, data, identity = _open(job, backend, unverified, method, training_first=True)
    name, first = next(iter(identity.datasets.items()))
    if one_set:
        data = first
        check(Job(job.config, streams=streams_of(None, data), command="predict"))
    build_together(job.config, task, backend, data=identity)
    found, is_ema, notes = load_verified(place, unverified, backend, job.config, identity)
    session = Session(
        config=job.config,
        backend=backend,
        # the size of the training data is all that the plan needs of it
        data=TrainingData(job.config, backend.workers, range(found.manifest.data_size), data),
        services=Services(Report(), found.run_dir),
        state=RunState(Progress(found.manifest.step, found.manifest.samples)),
    )
    return OpenRun(task, name, session, found, is_ema, (*identity.notes, *notes))


def _open(
    job: JobSpec, backend: Backend, found: Checkpoint, method: str, training_first: bool = False
) -> tuple[Any, Any, JobData]:
    """Collective. Make the task and open the data, perhaps after the training data, as training does."""
    config = job.config
    for with_training in (True,) if training_first else (False, True):
        task = new_task(job)
        method = method or ("predict_data" if hasattr(task, "predict_data") else "eval_data")
        if not hasattr(task, method):
            raise DataError(f"task {config.task} has no {method}()", "Use another --split.", everywhere=True)
        if with_training:
            with suppress(HvdtrainError):  # they may not be there
                open_data(task, config, "train_data")
        try:
            data, values = open_data(task, config, method)
            break
        except TaskError:  # what training data set may be missing
            if with_training:
                raise
    assert_consistent(backend.workers, values, SAME_DATA)
    if data is None:
        remedy = "Give the task such data, or name other data."
        problem = f"{method}() of task {config.task} gave None: there are no samples"
        raise DataError(problem, remedy, everywhere=True)
    trained = found.manifest.data.get("train_data")
    opened = {words_for(key): dataset for key, dataset in keyed(method, data).items()}
    notes = align_columns(opened, trained.columns if trained else {}, "the checkpoint's training data")
    identity = identify_data(backend.workers, {method: data}, config)
    return task, data, replace(identity, notes=(*identity.notes, *notes))


def load_verified(
    place: PathOrUrl, unverified: Checkpoint, backend: Backend, config: Config, data: JobData = NO_DATA
) -> tuple[Checkpoint, bool, list[str]]:
    """Collective. Verify the checkpoint, compare the data with it and load its weights."""
    states: list[PortableState] = []  # rank 0's alone: it does not travel as an object

    def read() -> tuple[Checkpoint, bool, list[str]]:
        found = verified(place, unverified.manifest)
        notes = [*found.notes(), *compare_with_checkpoint(found, data, config)]
        state, is_ema = read_weights(found, prefer_ema=config.ema_decay is not None)
        states.append(state)
        return found, is_ema, notes

    found, is_ema, notes = run_on_rank_zero(backend.workers, read, doing="reading the checkpoint")
    with misfits_named(found):
        backend.scatter_state(states.pop() if states else None, StatePart.WEIGHTS)
    return found, is_ema, [*notes, *changed_outputs(found, backend, config, is_ema)]


def check_not_there(output: Path, force: bool, may_be_folder: bool = False) -> None:
    """Check that nothing is lost when a file, or a folder that TensorFlow writes, is written."""
    if not output.exists():
        return
    if not force:
        raise UsageError(f"{output} exists", "Give another --output, or --force to replace it.")
    if output.is_dir() and not (may_be_folder and (output / "saved_model.pb").exists()):
        raise UsageError(f"{output} is a directory, and no export: --force does not replace it")


@contextmanager
def written_beside(output: Path) -> Iterator[Path]:
    """Return a context with a path of the same name in a folder next to; the folder is removed at its end."""
    if len(os.fsencode(output.name)) > _MOST_NAME_BYTES:
        raise UsageError(
            f"{output}: its last part is longer than {_MOST_NAME_BYTES} bytes", "Give a shorter name."
        )
    folder = output.with_name(f".new-{output.name}")
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        if folder.is_symlink():
            folder.unlink()
        elif folder.exists():
            shutil.rmtree(folder)  # what a killed export left
        folder.mkdir()
    except OSError as error:
        raise EnvironmentFault(f"cannot write {output}: {error.strerror or error}") from None
    try:
        yield folder / output.name
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def put_into_place(written: Path, output: Path) -> None:
    """Rename what was written, and what lies next to it for it; what was there is removed."""
    # the file itself last: it needs the others
    for part in sorted(written.parent.iterdir(), key=lambda part: part == written):
        place = output.with_name(part.name)
        if part.is_file():
            part.chmod(place.parent.stat().st_mode & 0o666)  # some libraries' files are the owner's alone
        try:
            if place.is_dir():
                place.rename(written.with_name(".old"))
            os.replace(part, place)
        except OSError as error:
            raise EnvironmentFault(f"cannot write {place}: {error.strerror or error}") from None
