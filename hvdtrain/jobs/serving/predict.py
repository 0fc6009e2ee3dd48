"""Predicting with a checkpoint: the model's outputs for every sample, in the data's order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.backends.base import Backend, model_files
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Layer
from hvdtrain.data.feed import HostBatch
from hvdtrain.data.training_data import readers_for
from hvdtrain.errors import NOT_THE_TASKS, EnvironmentFault, TaskError, WorkerFailure
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs.compatibility import check
from hvdtrain.jobs.features import Job
from hvdtrain.jobs.opening import checkpoint_config
from hvdtrain.jobs.opening.data_identity import words_for
from hvdtrain.jobs.opening.data_sets import streams_of
from hvdtrain.jobs.opening.limits import check_eval_batch
from hvdtrain.jobs.opening.setup import build_together
from hvdtrain.jobs.opening.start import JobSpec, handshake, prepare, started
from hvdtrain.jobs.serving.checkpoint import open_checkpoint_data
from hvdtrain.jobs.serving.evaluate import evaluation_session, load_verified
from hvdtrain.jobs.serving.outputs import Place, check_not_there, put_into_place, written_beside
from hvdtrain.jobs.serving.prediction_files import (
    Arrays,
    PredictionFile,
    Rows,
    check_suffix,
    prediction_file,
)
from hvdtrain.jobs.signals import interruptible
from hvdtrain.session import Session
from hvdtrain.storage.text import counted
from hvdtrain.storage.urls import shown
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import run_on_rank_zero
from hvdtrain.workers.seeding import seeded_frameworks
from hvdtrain.workers.user_errors import where_raised

SPLITS = ("train", "eval", "predict")
_LAYER = Layer("predict", {"on_bad_sample": "error", "compile": False, "checkpoint_activations": False})


# indices of samples, and their outputs
_Part = tuple[NDArray[np.int64], Rows]


@dataclass
class _Done:
    """Predictions that were made, as rank 0 knows them."""

    checkpoint: Checkpoint
    is_ema: bool
    path: Place | None
    what: str
    samples: int = 0
    shapes: dict[str, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        """Return what was predicted and written, in words."""
        outputs = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        notes = [*self.notes]
        if self.left_out:
            notes.append(f"without {', '.join(sorted(self.left_out))}, which is one value for a whole batch")
        weights = "EMA weights, " * self.is_ema
        return (
            f"predictions: {shown(self.path or 'returned')} "
            f"({counted(self.samples, 'sample')} of the {self.what}: {outputs})\n"
            f"of {self.checkpoint.path}, {weights}step {self.checkpoint.manifest.step:,}"
            + "".join(f"\nnote: {note}" for note in notes)
        )


def predict_checkpoint(
    path: Place,
    given: list[Layer],
    output: Place,
    split: str | None = None,
    force: bool = False,
    *,
    task_class: Any = None,
    from_python: bool = False,
) -> None:
    """Collective. Write the model's outputs for every sample to a file, in the data's order.

    Args:
        path: a checkpoint, or a run for its newest good one; or the URL of one.
        given: the user's config layers, weakest first.
        output: the file or its URL, which ends with ``.npz`` or ``.parquet``.
        split: one of ``SPLITS``; the task's ``predict_data()`` if it has one, else its evaluation data.
        force: replace a file that is there.
        task_class: the task's class if the caller has it.
        from_python: whether a script called: then Horovod stays if all workers fail.

    Raises:
        UsageError: If the output exists or has the wrong ending.
        EnvironmentFault: If it cannot be written.
        DataError: If the task has no such data, or a sample cannot be read.
        TaskError: If the task's loss does not call the model once, or an output is not by sample.
    """
    check_suffix(output)
    with _started(path, given, task_class, from_python) as (job, backend, found):
        run_on_rank_zero(backend.workers, lambda: check_not_there(output, force))
        with _opened(backend, output) as open_file:
            done = _predict(job, backend, path, found, _Target(split, output, open_file))
        _show(backend, done)


def predict_arrays(
    path: Place, given: list[Layer], split: str | None = None, task_class: Any = None
) -> dict[str, NDArray[Any]]:
    """Collective. Return the model's outputs for every sample, in the data's order, on every worker.

    Args:
        path: a checkpoint, or a run for its newest good one; or the URL of one.
        given: the user's config layers, weakest first.
        split: as for ``predict_checkpoint``.
        task_class: the task's class if the caller has it.

    Raises:
        HvdtrainError: as ``predict_checkpoint`` raises them.
    """
    arrays = Arrays()
    with _started(path, given, task_class, from_python=True) as (job, backend, found):
        _show(backend, _predict(job, backend, path, found, _Target(split, None, lambda samples: arrays)))
    return arrays.joined()


@contextmanager
def _started(
    path: Place, given: list[Layer], task_class: Any, from_python: bool
) -> Iterator[tuple[JobSpec, Backend, Checkpoint]]:
    """Collective. Return a context with the job, its backend, and the checkpoint, unverified."""
    with interruptible() as signals, seeded_frameworks():
        found = checkpoint_config.find_unverified(path)
        job = prepare(checkpoint_config.layers_of(found, [_LAYER, *given]), task_class)
        check(Job(job.config, command="predict"))
        with started(job, signals, stays=from_python) as backend, signals.signals_take_precedence():
            yield job, backend, found


@dataclass(frozen=True)
class _Target:
    """What is predicted, and where it goes: to a file on rank 0, or without a path to every worker's memory.

    ``split`` is the name of the split if the user gave one. ``open_file`` returns what takes that number of
    rows.
    """

    split: str | None
    path: Place | None
    open_file: Callable[[int], PredictionFile]


def _predict(
    job: JobSpec,
    backend: Backend,
    path: Place,
    unverified: Checkpoint,
    target: _Target,
) -> _Done:
    """Collective. Agree, build, load the weights, and go over the data.

    Args:
        job: the job.
        backend: its backend.
        path: what the user named.
        unverified: the checkpoint that was found there.
        target: what is predicted, and where the outputs go.
    """
    split = target.split
    handshake(job, backend)
    task, _, identity = open_checkpoint_data(job, backend, unverified, f"{split}_data" if split else "")
    name, data = next(iter(identity.datasets.items()))  # of several sets, the first
    check(Job(job.config, streams=streams_of(None, data), command="predict"))
    build_together(job.config, task, backend, data=identity)
    found, is_ema, notes = load_verified(path, unverified, backend, job.config, identity)
    session = evaluation_session(job.config, backend, found, data)
    check_eval_batch(job.config, session.plan(), data, backend.workers.local_size)
    done = _Done(found, is_ema, target.path, words_for(name), notes=(*identity.notes, *notes))
    try:
        file = _file_of(backend, target, len(data))
        with backend.ema_weights():
            for part in _parts(session, job, done):
                _take(backend, target, file, part, done)
        if target.path is not None:
            run_on_rank_zero(backend.workers, lambda: _finish(file, done), doing="writing the predictions")
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise WorkerFailure(f"prediction failed: {where_raised(error)}") from error
    return done


def _show(backend: Backend, done: _Done) -> None:
    if backend.workers.rank == 0:
        open_console().print(done.describe(), highlight=False, markup=False, soft_wrap=True)


@contextmanager
def _opened(backend: Backend, output: Place) -> Iterator[Callable[[int], PredictionFile]]:
    """Collective. Return a context with what opens the file, which is in its place after a good end.

    Rank 0 opens it.
    """
    with ExitStack() as stack:
        opened: list[Any] = []  # on rank 0

        def open_file(samples: int) -> PredictionFile:
            opened.append(stack.enter_context(written_beside(output)))
            return prediction_file(opened[0], samples)

        yield open_file
        run_on_rank_zero(
            backend.workers, lambda: put_into_place(opened[0], output), doing="writing the predictions"
        )


def _file_of(backend: Backend, target: _Target, samples: int) -> PredictionFile | None:
    """Collective. Return what takes the outputs: on rank 0 alone if it is a file."""
    if target.path is None:
        return target.open_file(samples)
    files: list[PredictionFile] = []  # on rank 0
    run_on_rank_zero(backend.workers, lambda: files.append(target.open_file(samples)))
    return files[0] if files else None


def _parts(session: Session, job: JobSpec, done: _Done) -> Iterator[_Part]:
    """Yield this worker's part of the outputs, batch by batch, without padding."""
    backend = session.backend
    files = model_files(backend)
    with (
        readers_for(job.config, None, session.data.evaluation) as session.data.readers,
        session.data.eval_feed(session.plan()) as feed,
    ):
        hosts: deque[HostBatch] = deque()  # the device's batches come later
        for batch in backend.to_device(_noted(feed, hosts)):
            ACTIVITY.enter("predicting", is_long=True)
            host = hosts.popleft()
            real = host.weights[0] > 0
            outputs = _by_sample(files.predict(batch), len(real), done)
            yield host.indices[0][real], {name: array[real] for name, array in outputs.items()}


def _noted(feed: Iterable[HostBatch], hosts: deque[HostBatch]) -> Iterator[HostBatch]:
    for batch in feed:
        hosts.append(batch)
        yield batch


def _by_sample(outputs: Rows, samples: int, done: _Done) -> dict[str, NDArray[Any]]:
    """Return the outputs that have a row for each sample; a single number, such as a loss, is left out.

    Raises:
        TaskError: If an output has another first axis.
    """
    kept = {}
    for name, array in outputs.items():
        if array.ndim == 0:
            done.left_out.add(name)
        elif len(array) != samples:
            raise TaskError(
                f"output {name!r} of the model has shape {array.shape} for {samples} samples: its first axis "
                "must be the batch's",
                "Give the task torch_serve(model, batch) or tf_serve(model, batch), which returns the "
                "outputs by sample.",
            )
        else:
            kept[name] = array
    if not kept:
        raise TaskError("the model gives no output by sample", "See docs/serving.md on torch_serve.")
    return kept


def _take(backend: Backend, target: _Target, file: PredictionFile | None, part: _Part, done: _Done) -> None:
    """Collective. Bring the workers' parts of one step together and write them, in the data's order.

    Raises:
        EnvironmentFault: On every worker, if they cannot be written.
    """
    everyone = backend.workers.allgather_object(part)

    def add() -> None:
        assert file is not None  # called only by those that have it
        for indices, rows in everyone:
            if not len(indices):
                continue
            expected = np.arange(done.samples, done.samples + len(indices))
            assert (indices == expected).all(), "workers have consecutive samples, in the order of ranks"
            try:
                file.add(rows)
            except OSError as error:
                raise _cannot_write(target.path, error) from None
            done.samples += len(indices)
            done.shapes = {name: f"{array.dtype} {array.shape[1:]}" for name, array in rows.items()}

    if target.path is None:
        add()
    else:
        run_on_rank_zero(backend.workers, add)


def _finish(file: PredictionFile | None, done: _Done) -> None:
    assert file is not None  # rank 0 has it
    try:
        file.finish()
    except OSError as error:
        raise _cannot_write(done.path, error) from None


def _cannot_write(path: Place | None, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(f"cannot write {shown(path)}: {error.strerror or error}", "Nothing was written.")
