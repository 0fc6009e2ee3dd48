"""Evaluating a checkpoint, and its outputs for every sample: any number of workers, either framework."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Unpack

from numpy.typing import NDArray

from hvdtrain.config.train_options import TrainOptions
from hvdtrain.data.eval_sets import metric_prefixes, sets_of
from hvdtrain.data.training_data import readers_for
from hvdtrain.early_stopping import metrics_by_set
from hvdtrain.errors import EnvironmentFault, TaskError, UsageError, WorkerFailure
from hvdtrain.host.launcher import muted_console
from hvdtrain.jobs.opening.data_identity import words_for
from hvdtrain.jobs.opening.data_sets import known_size
from hvdtrain.jobs.opening.dry_run import check_alone
from hvdtrain.jobs.serving.checkpoint import (
    Call,
    OpenRun,
    check_not_there,
    given_output,
    open_run,
    opened,
    put_into_place,
    show,
    written_beside,
)
from hvdtrain.jobs.serving.prediction_files import FORMATS, Arrays, ParquetFile, Rows, check_suffix
from hvdtrain.reporting.console import describe_means
from hvdtrain.reporting.jsonl import AppendFile, to_json
from hvdtrain.session import Session
from hvdtrain.step_end import evaluate as run_evaluation
from hvdtrain.storage.text import counted, url_of, with_urls
from hvdtrain.workers.activity import ACTIVITY
from hvdtrain.workers.agreement import run_on_rank_zero
from hvdtrain.workers.user_errors import task_errors

EVALUATIONS_FILE = "evaluations.jsonl"


def evaluate(
    checkpoint: str | Path,
    task: Any = None,
    *,
    framework: str | None = None,
    best: bool | str = False,
    output: str | Path | None = None,
    quiet: bool = False,
    **fields: Unpack[TrainOptions],
) -> dict[str, float]:
    """Evaluate a checkpoint; the same as ``python -m hvdtrain evaluate``, from a script.

    Collective: every worker of the job calls it.

    Args:
        checkpoint: a checkpoint's directory, or a run's for its newest good one; or its URL.
        task: the task's class, an instance of it, or its name or path as ``--task`` takes it. The
            checkpoint's if not given; must be given if that is not a built-in one.
        framework: "torch" or "tf"; the one that trained it if not given.
        best: of a run, take the best checkpoint that is kept: True by the metric that the run kept the best
            of, or by the loss; or a metric, written as for ``keep_best``.
        output: the file of JSON lines to append the metrics to; ``evaluations.jsonl`` in the run directory if
            not given; of a run at a URL, none is written then.
        quiet: show nothing on the console.
        fields: config fields that are to differ from the checkpoint's, such as ``eval_batch_size=64``.

    Returns:
        Name to mean over the evaluation samples: "loss" and the task's metrics, with the name of the set
        before those of other sets than the first: "noisy/loss". The same on every worker.

    Raises:
        HvdtrainError: as ``hvdtrain.train`` raises them.
    """
    call = Call.of("evaluate", checkpoint, task, fields, framework=framework, best=best)
    with muted_console(quiet):
        return evaluate_checkpoint(call, None if output is None else given_output(output))


def evaluate_checkpoint(call: Call, output: Path | None = None) -> dict[str, float]:
    """Collective. Evaluate a checkpoint, show the metrics and append them to a file of JSON lines."""
    with opened(call, "evaluate") as (job, backend, unverified):
        run = open_run(job, backend, call.place, unverified, "eval_data")
        session, data = run.session, run.session.data.evaluation
        check_alone(session, run.task)
        begun = time.perf_counter()
        with (
            task_errors("evaluation failed", WorkerFailure),
            readers_for(job.config, None, data) as session.data.readers,
        ):
            metrics = run_evaluation(session, session.plan())
        seconds = time.perf_counter() - begun
        run_on_rank_zero(backend.workers, lambda: _report(run, metrics, seconds, output))
    return metrics


def _report(run: OpenRun, metrics: dict[str, float], seconds: float, output: Path | None) -> None:
    """Show the metrics and append them to a file."""
    session, manifest, checkpoint = run.session, run.found.manifest, run.found.path
    config, workers, bad = session.config, session.backend.workers.size, session.data.skipped.count
    sizes = {name: known_size(one) or 0 for name, one in sets_of(session.data.evaluation).items()}
    lines = []
    for name, means in metrics_by_set(metrics, list(sizes)).items():
        shown = f"{name}  {describe_means(means)}" if name else describe_means(means)
        lines.append(f"eval  {shown}  ({counted(sizes[name], 'sample')}")
    unread = f"; {counted(bad, 'sample')} could not be read" if bad else ""
    place = f"{'EMA weights, ' * run.is_ema}step {manifest.step:,}: {checkpoint}{unread})"
    text = ")\n".join(lines)
    show(f"{text} of {config.task}, {counted(workers, 'worker')}, {config.framework}, {place}", run.notes)
    if output is None and url_of(checkpoint):
        return  # a run in a store is not written to
    prefixes = metric_prefixes(session.data.evaluation)
    of_sets = {f"{prefixes[name]}eval_samples": size for name, size in sizes.items()}
    record = {
        "checkpoint": with_urls(str(checkpoint)),
        "step": manifest.step,
        "samples": manifest.samples,
        "epoch": round(manifest.epoch, 6),
        "averaged_weights": run.is_ema,
        **metrics,
        "task": config.task,
        "framework": config.framework,
        "workers": workers,
        **of_sets,
        **({"bad_samples": bad} if bad else {}),
        "seconds": round(seconds, 4),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path = output or run.found.run_dir / EVALUATIONS_FILE
    try:
        file = AppendFile(path, follow=output is not None)
        problem = file.append((to_json(record) + "\n").encode())
        file.close()
        if problem is not None:
            raise problem
    except OSError as error:
        failed = f"cannot write {path}: {error.strerror or error}"
        if output is not None:
            raise EnvironmentFault(failed, "The metrics above are all there is.") from None
        show("", [f"{failed}; --output names another file"])


SPLITS = ("train", "eval", "predict")
_FIELDS = {"on_bad_sample": "error", "compile": False, "checkpoint_activations": False}


@dataclass
class _Predictions:
    """Predictions that were made, as rank 0 knows them."""

    file: Arrays | ParquetFile
    shapes: dict[str, str] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)

    def add(self, everyone: Sequence[Rows]) -> None:
        """Write the workers' parts of one step, which are consecutive samples in the order of ranks."""
        for rows in everyone:
            if rows:
                self.file.add(rows)
                self.shapes = {name: f"{array.dtype} {array.shape[1:]}" for name, array in rows.items()}

    def describe(self, run: OpenRun, output: Path | None) -> str:
        """Return what was predicted and written, as text."""
        outputs = ", ".join(f"{name} {shape}" for name, shape in self.shapes.items())
        notes = [*run.notes]
        if self.left_out:
            notes.append(f"without {', '.join(sorted(self.left_out))}, which is one value for a whole batch")
        rows = f"{counted(len(run.session.data.evaluation), 'sample')} of the {words_for(run.name)}"
        weights, step = "EMA weights, " * run.is_ema, run.found.manifest.step
        lines = [f"predictions: {output or 'returned'} ({rows}: {outputs})"]
        lines += [f"of {run.found.path}, {weights}step {step:,}", *(f"note: {note}" for note in notes)]
        return "\n".join(lines)


def predict(
    checkpoint: str | Path,
    task: Any = None,
    *,
    framework: str | None = None,
    output: str | Path | None = None,
    split: str | None = None,
    force: bool = False,
    best: bool | str = False,
    quiet: bool = False,
    **fields: Unpack[TrainOptions],
) -> dict[str, NDArray[Any]] | Path:
    """Return a model's outputs for every sample; the same as ``python -m hvdtrain predict``.

    Collective: every worker of the job calls it.

    ``checkpoint``, ``task``, ``framework``, ``best``, ``quiet`` and ``fields`` are those of ``evaluate``.
    ``output`` is a file to write to, which ends with ``.npz`` or ``.parquet``; without one the outputs are
    returned, and must fit into the memory of each worker. ``split`` is "train", "eval" or "predict", the data
    of the task; if not given, its ``predict_data()`` if it has one, else its evaluation data. ``force``
    replaces a file that is there.

    Returns:
        Name to array, with a row for each sample in the order of the data: the same on every worker. The
        file's path if ``output`` is given.

    Raises:
        UsageError: If the output exists or has the wrong ending, or there is no such split.
        HvdtrainError: as ``hvdtrain.evaluate`` raises them.
    """
    if split is not None and split not in SPLITS:
        raise UsageError(f"there is no split {split!r}", f"Splits: {', '.join(SPLITS)}.")
    call = Call.of("predict", checkpoint, task, fields, framework=framework, best=best)
    with muted_console(quiet):
        if output is None:
            return predict_checkpoint(call, None, split).joined()
        file = given_output(output)
        predict_checkpoint(call, file, split, force)
        return file


def predict_checkpoint(
    call: Call, output: Path | None, split: str | None = None, force: bool = False
) -> Arrays:
    """Collective. Write the model's outputs for every sample to a file, in the data's order."""
    arrays = Arrays()
    if output is not None:
        check_suffix(output)
    with opened(call, "predict", _FIELDS) as (job, backend, unverified), ExitStack() as stack:
        workers, written = backend.workers, list[Path]()

        def once(work: Callable[[], None]) -> None:
            """Work on rank 0 if it is for a file, and else on every worker."""

            def write() -> None:
                try:
                    work()
                except OSError as error:
                    problem = f"cannot write {output}: {error.strerror or error}"
                    raise EnvironmentFault(problem, "Nothing was written.") from None

            if output is None:
                return work()
            return run_on_rank_zero(workers, write, doing="writing the predictions")

        if output is not None:
            run_on_rank_zero(workers, lambda: check_not_there(output, force))
        method = f"{split}_data" if split else ""
        run = open_run(job, backend, call.place, unverified, method, one_set=True)
        done = _Predictions(arrays)

        def open_file() -> None:
            if output is not None:
                written.append(stack.enter_context(written_beside(output)))
                done.file = FORMATS[output.suffix](written[0], len(run.session.data.evaluation))

        once(open_file)
        with task_errors("prediction failed", WorkerFailure), backend.ema_weights():
            for part in _parts(run.session, done):
                once(partial(done.add, workers.allgather_object(part)))
            once(done.file.finish)
        if output is not None:
            once(lambda: put_into_place(written[0], output))
        if workers.rank == 0:
            show(done.describe(run, output))
    return arrays


def _parts(session: Session, done: _Predictions) -> Iterator[Rows]:
    """Yield this worker's part of the outputs, batch by batch, without padding."""
    with (
        readers_for(session.config, None, session.data.evaluation) as session.data.readers,
        session.data.eval_feed(session.plan()) as feed,
    ):
        for batch in session.backend.to_device(feed):
            ACTIVITY.enter("predicting", is_long=True)
            real, kept = batch.samples.weights[0] > 0, {}
            for name, array in session.backend.predict(batch).items():
                if array.ndim == 0:  # a single number, such as a loss
                    done.left_out.add(name)
                elif len(array) != len(real):
                    raise TaskError(
                        f"output {name!r} of the model has shape {array.shape} for {len(real)} samples: its "
                        "first axis must be the batch's",
                        "Give the task torch_serve(model, batch) or tf_serve(model, batch), which returns "
                        "the outputs by sample.",
                    )
                else:
                    kept[name] = array[real]
            if not kept:
                remedy = "See `hvdtrain docs serving` on torch_serve."
                raise TaskError("the model gives no output by sample", remedy)
            yield kept if real.any() else {}
