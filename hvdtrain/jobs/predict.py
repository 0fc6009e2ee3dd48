"""Predicting with a checkpoint: the model's outputs for every sample, in the data's order."""

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdtrain.activity import ACTIVITY
from hvdtrain.agreement import run_on_rank_zero
from hvdtrain.backends import model_files
from hvdtrain.backends.base import Backend
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Layer
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import NOT_THE_TASKS, EnvironmentFault, TaskError, UsageError, WorkerFailure
from hvdtrain.frameworks import FRAMEWORKS
from hvdtrain.host.launcher import open_console
from hvdtrain.jobs import checkpoint_config
from hvdtrain.jobs.batch_limits import check_eval_batch
from hvdtrain.jobs.checkpoint_data import open_checkpoint_data
from hvdtrain.jobs.data_identity import words_for
from hvdtrain.jobs.evaluate import evaluation_session, load_verified
from hvdtrain.jobs.export import check_not_there, put_into_place, written_beside
from hvdtrain.jobs.prediction_files import PredictionFile, Rows, check_suffix, prediction_file
from hvdtrain.jobs.setup import (
    JobSpec,
    build_together,
    handshake,
    prepare,
    started,
)
from hvdtrain.jobs.signals import interruptible
from hvdtrain.seeding import seeded_frameworks
from hvdtrain.session import Session, readers_for
from hvdtrain.user_errors import where_raised
from hvdtrain.words import counted

SPLITS = ("train", "eval", "predict")
_LAYER = Layer("predict", {"on_bad_sample": "error", "compile": False, "checkpoint_activations": False})


# indices of samples, and their outputs
_Part = tuple[NDArray[np.int64], Rows]


@dataclass
class _Done:
    """Predictions that were made, as rank 0 knows them."""

    checkpoint: Checkpoint
    is_ema: bool
    path: Path
    what: str
    samples: int = 0
    shapes: dict[str, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        outputs = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        notes = [*self.notes]
        if self.left_out:
            notes.append(f"without {', '.join(sorted(self.left_out))}, which is one value for a whole batch")
        weights = "EMA weights, " * self.is_ema
        return (
            f"predictions: {self.path} ({counted(self.samples, 'sample')} of the {self.what}: {outputs})\n"
            f"of {self.checkpoint.path}, {weights}step {self.checkpoint.manifest.step:,}"
            + "".join(f"\nnote: {note}" for note in notes)
        )


def predict_checkpoint(
    path: Path, given: list[Layer], output: Path, split: str | None = None, force: bool = False
) -> None:
    """Collective. Write the model's outputs for every sample to a file, in the data's order.

    Args:
        path: a checkpoint, or a run for its newest good one.
        given: the user's config layers, weakest first.
        output: the file, which ends with ``.npz`` or ``.parquet``.
        split: one of ``SPLITS``; the task's ``predict_data()`` if it has one, else its evaluation data.
        force: replace a file that is there.

    Raises:
        UsageError: If the output exists or has the wrong ending.
        EnvironmentFault: If it cannot be written.
        DataError: If the task has no such data, or a sample cannot be read.
        TaskError: If the task's loss does not call the model once, or an output is not by sample.
    """
    check_suffix(output)
    with interruptible() as signals, seeded_frameworks():
        found = checkpoint_config.find_unverified(path)
        job = prepare(checkpoint_config.layers_of(found, [_LAYER, *given]))
        if job.config.on_bad_sample == "skip":
            raise UsageError(
                "on_bad_sample skip: predictions have a row for every sample",
                "Leave it out, or give the task predict_data() without the samples that cannot be read.",
                everywhere=True,
            )
        with started(job, signals) as backend, signals.signals_take_precedence():
            run_on_rank_zero(backend.workers, lambda: check_not_there(output, force))
            done = _predict(job, backend, path, found, (output, split))
            if backend.workers.rank == 0:
                open_console().print(done.describe(), highlight=False, markup=False, soft_wrap=True)


def _predict(
    job: JobSpec, backend: Backend, path: Path, unverified: Checkpoint, wanted: tuple[Path, str | None]
) -> _Done:
    """Collective. Agree, build, load the weights, and go over the data.

    Args:
        job: the job.
        backend: its backend.
        path: what the user named.
        unverified: the checkpoint that was found there.
        wanted: the file to write, and the name of the split if the user gave one.
    """
    output, split = wanted
    handshake(job, backend)
    task, _, identity = open_checkpoint_data(job, backend, unverified, f"{split}_data" if split else "")
    name, data = next(iter(identity.datasets.items()))  # of several sets, the first
    build_together(job.config, task, backend)
    found, is_ema, notes = load_verified(path, unverified, backend, job.config, identity)
    session = evaluation_session(job.config, backend, found, data)
    check_eval_batch(job.config, session.plan(), data, backend.workers.local_size)
    done = _Done(found, is_ema, output, words_for(name), notes=(*identity.notes, *notes))
    try:
        with _opened(backend, output, len(data)) as file, backend.ema_weights():
            for part in _parts(session, job, done):
                _write(backend, file, part, done)
            run_on_rank_zero(backend.workers, lambda: _finish(file, done), doing="writing the predictions")
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise WorkerFailure(f"prediction failed: {where_raised(error)}") from error
    return done


@contextmanager
def _opened(backend: Backend, output: Path, samples: int) -> Iterator[PredictionFile | None]:
    """Collective. Return a context with the file on rank 0, which is in its place after a good end."""
    with ExitStack() as stack:
        opened: list[tuple[PredictionFile, Path]] = []  # on rank 0

        def open_file() -> None:
            written = stack.enter_context(written_beside(output))
            opened.append((prediction_file(written, samples), written))

        run_on_rank_zero(backend.workers, open_file)
        yield opened[0][0] if opened else None
        run_on_rank_zero(backend.workers, lambda: put_into_place(opened[0][1], output))


def _parts(session: Session, job: JobSpec, done: _Done) -> Iterator[_Part]:
    """Yield this worker's part of the outputs, batch by batch, without padding."""
    backend = session.backend
    files = model_files(backend, FRAMEWORKS[job.config.framework])
    with (
        readers_for(job.config, None, session.eval_data) as session.readers,
        session.eval_feed(session.plan()) as feed,
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


def _write(backend: Backend, file: PredictionFile | None, part: _Part, done: _Done) -> None:
    """Collective. Bring the workers' parts of one step to rank 0 and write them, in the data's order.

    Raises:
        EnvironmentFault: On every worker, if they cannot be written.
    """
    everyone = backend.workers.allgather_object(part)

    def add() -> None:
        assert file is not None  # rank 0 has it
        for indices, rows in everyone:
            if not len(indices):
                continue
            expected = np.arange(done.samples, done.samples + len(indices))
            assert (indices == expected).all(), "workers have consecutive samples, in the order of ranks"
            try:
                file.add(rows)
            except OSError as error:
                raise _cannot_write(done.path, error) from None
            done.samples += len(indices)
            done.shapes = {name: f"{array.dtype} {array.shape[1:]}" for name, array in rows.items()}

    run_on_rank_zero(backend.workers, add)


def _finish(file: PredictionFile | None, done: _Done) -> None:
    assert file is not None  # rank 0 has it
    try:
        file.finish()
    except OSError as error:
        raise _cannot_write(done.path, error) from None


def _cannot_write(path: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(f"cannot write {path}: {error.strerror or error}", "Nothing was written.")
