"""Opening the data that a checkpoint is evaluated on or predicts."""

from contextlib import suppress
from dataclasses import replace
from typing import Any

from hvdtrain.backends.base import Backend
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.errors import DataError, HvdtrainError, TaskError
from hvdtrain.jobs.opening.data_identity import (
    SAME_DATA,
    JobData,
    identify_data,
    is_changed,
    keyed,
    words_for,
)
from hvdtrain.jobs.opening.data_sets import align_columns
from hvdtrain.jobs.opening.setup import JobSpec, new_task, open_data
from hvdtrain.workers.agreement import assert_consistent


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
