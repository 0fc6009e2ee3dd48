"""Evaluating a checkpoint: alone or with many workers, in either framework."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console

from hvdtrain.backends.base import Backend
from hvdtrain.backends.records import PortableState
from hvdtrain.checkpoints.remote.fetched import run_place_of
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config, Layer
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.data.training_data import TrainingData, readers_for
from hvdtrain.early_stopping import SEPARATOR, metrics_by_set
from hvdtrain.errors import NOT_THE_TASKS, EnvironmentFault, UsageError, WorkerFailure
from hvdtrain.host.launcher import muted_console, open_console
from hvdtrain.jobs.failures import end_if_uncaught
from hvdtrain.jobs.opening import checkpoint_config
from hvdtrain.jobs.opening.checkpoint_config import changed_outputs, load_weights, read_weights
from hvdtrain.jobs.opening.data_identity import NO_DATA, JobData, compare_with_checkpoint
from hvdtrain.jobs.opening.data_sets import known_size
from hvdtrain.jobs.opening.dry_run import check_alone
from hvdtrain.jobs.opening.limits import check_eval_batch
from hvdtrain.jobs.opening.setup import build_together
from hvdtrain.jobs.opening.start import JobSpec, handshake, prepare, started
from hvdtrain.jobs.run_directory.folder import run_dir_of
from hvdtrain.jobs.serving.checkpoint import chosen_checkpoint, open_checkpoint_data
from hvdtrain.jobs.serving.outputs import Place, place_in, place_of
from hvdtrain.jobs.signals import interruptible
from hvdtrain.reporting.console import describe_means
from hvdtrain.reporting.jsonl import AppendFile, to_json
from hvdtrain.reporting.report import Report
from hvdtrain.run_state import RunState
from hvdtrain.session import Services, Session
from hvdtrain.step_end import evaluate as run_evaluation
from hvdtrain.storage.files import expand_path
from hvdtrain.storage.text import counted, with_urls
from hvdtrain.storage.transfers import append_line
from hvdtrain.storage.urls import shown
from hvdtrain.task import task_class_of, task_spec
from hvdtrain.training_plan import Progress
from hvdtrain.workers.agreement import run_on_rank_zero
from hvdtrain.workers.seeding import seeded_frameworks
from hvdtrain.workers.user_errors import where_raised

EVALUATIONS_FILE = "evaluations.jsonl"


def evaluate(
    checkpoint: str | Path,
    task: Any = None,
    *,
    framework: str | None = None,
    best: bool | str = False,
    output: str | Path | None = None,
    quiet: bool = False,
    **fields: Any,
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
            not given.
        quiet: show nothing on the console.
        fields: config fields that are to differ from the checkpoint's, such as ``eval_batch_size=64``.

    Returns:
        Name to mean over the evaluation samples: "loss" and the task's metrics, with the name of the set
        before those of other sets than the first: "noisy/loss". The same on every worker.

    Raises:
        HvdtrainError: as ``hvdtrain.train`` raises them.
    """
    end_if_uncaught()
    given = [given_layer("evaluate", task, framework, fields)]
    written = None if output is None else given_path(output)
    with muted_console(quiet):
        path = chosen_checkpoint(checkpoint_path(checkpoint), best)
        return evaluate_checkpoint(path, given, task_class_of(task), written, from_python=True)


def given_layer(function: str, task: Any, framework: str | None, fields: Mapping[str, Any]) -> Layer:
    """Return the config fields that a caller from Python gave, with the task and the framework."""
    given = dict(fields)
    if task is not None:
        given["task"] = task_spec(task)
    if framework is not None:
        given["framework"] = framework
    return Layer(f"{function}()", given)


def checkpoint_path(text: str | Path) -> Place:
    """Return the path or URL of a checkpoint as a user gave it, with ``~`` and variables replaced.

    Raises:
        UsageError: If a variable is not set.
    """
    return given_path(text, "checkpoint ")


def given_path(text: str | Path, what: str = "") -> Place:
    """Return a path or URL as a user gave it, with ``~`` and variables replaced.

    Raises:
        UsageError: If a variable is not set, or it is no URL though it looks like one.
    """
    try:
        return place_of(expand_path(str(text)))
    except ValueError as error:
        raise UsageError(f"{what}{shown(text)}: {error}") from None


def evaluate_checkpoint(
    path: Place,
    given: list[Layer],
    task_class: Any = None,
    output: Place | None = None,
    *,
    from_python: bool = False,
) -> dict[str, float]:
    """Collective. Evaluate a checkpoint, show the metrics and append them to a file.

    Args:
        path: a checkpoint, or a run for its newest good one; or the URL of one.
        given: the user's config layers, weakest first.
        task_class: the task's class if the caller has it.
        output: the file of JSON lines, in place of ``evaluations.jsonl`` in the run directory.
        from_python: whether a script called: then Horovod stays if all workers fail.

    Raises:
        EnvironmentFault: If ``output`` cannot be written; the metrics were shown.
        DataError: If the task has no evaluation data.
    """
    with interruptible() as signals, seeded_frameworks():
        found = checkpoint_config.find_unverified(path)
        job = prepare(checkpoint_config.layers_of(found, given), task_class)
        with (
            started(job, signals, stays=from_python) as backend,
            signals.signals_take_precedence(),
        ):
            done = _evaluate(job, backend, path, found)
            run_on_rank_zero(backend.workers, lambda: _report(done, output))
        return done.metrics


@dataclass(frozen=True)
class _Done:
    """An evaluation that was done; ``sizes`` has the samples of each set by its name."""

    checkpoint: Checkpoint
    is_ema: bool
    config: Config
    metrics: dict[str, float]
    workers: int
    sizes: Mapping[str, int]
    seconds: float
    bad_samples: int = 0
    notes: tuple[str, ...] = ()

    def describe(self) -> str:
        step = self.checkpoint.manifest.step
        weights = "EMA weights, " if self.is_ema else ""
        lines = []
        for name, means in metrics_by_set(self.metrics, list(self.sizes)).items():
            shown = f"{name}  {describe_means(means)}" if name else describe_means(means)
            lines.append(f"eval  {shown}  ({counted(self.sizes[name], 'sample')}")
        return (
            ")\n".join(lines) + f" of {self.config.task}, "
            f"{counted(self.workers, 'worker')}, {self.config.framework}, "
            f"{weights}step {step:,}: {self.checkpoint.path}"
            + (f"; {counted(self.bad_samples, 'sample')} could not be read)" if self.bad_samples else ")")
        )

    def as_dict(self) -> Mapping[str, Any]:
        manifest, (size, *_) = self.checkpoint.manifest, self.sizes.values()
        others = [f"{name}{SEPARATOR}eval_samples" for name in self.sizes][1:]
        return {
            "checkpoint": with_urls(str(self.checkpoint.path)),
            "step": manifest.step,
            "samples": manifest.samples,
            "epoch": round(manifest.epoch, 6),
            "averaged_weights": self.is_ema,
            **self.metrics,
            "task": self.config.task,
            "framework": self.config.framework,
            "workers": self.workers,
            "eval_samples": size,
            **dict(zip(others, list(self.sizes.values())[1:], strict=True)),
            **({"bad_samples": self.bad_samples} if self.bad_samples else {}),
            "seconds": round(self.seconds, 4),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def _evaluate(job: JobSpec, backend: Backend, path: Place, unverified: Checkpoint) -> _Done:
    """Collective. Agree, build, load the weights and run the loop's evaluation."""
    handshake(job, backend)
    task, data, identity = open_checkpoint_data(job, backend, unverified, "eval_data")
    build_together(job.config, task, backend, data=identity)
    found, is_ema, notes = load_verified(path, unverified, backend, job.config, identity)
    session = evaluation_session(job.config, backend, found, data)
    check_eval_batch(job.config, session.plan(), data, backend.workers.local_size)
    check_alone(session, task)
    begun = time.perf_counter()
    try:
        with readers_for(job.config, None, data) as session.data.readers:
            metrics = run_evaluation(session, session.plan())
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise WorkerFailure(f"evaluation failed: {where_raised(error)}") from error
    seconds = time.perf_counter() - begun
    sizes = {name: known_size(dataset) or 0 for name, dataset in sets_of(data).items()}
    all_notes, bad = (*identity.notes, *notes), session.data.skipped.count
    return _Done(found, is_ema, job.config, metrics, backend.workers.size, sizes, seconds, bad, all_notes)


def evaluation_session(config: Config, backend: Backend, found: Checkpoint, data: Any) -> Session:
    """Return a run that only goes over data with a checkpoint's model, and reports nothing."""
    manifest = found.manifest
    return Session(
        config=config,
        backend=backend,
        # the size of the training data is all that the plan needs of it
        data=TrainingData(config, backend.workers, range(manifest.data_size), data),
        services=Services(Report(), run_dir_of(found)),
        state=RunState(Progress(manifest.step, manifest.samples)),
    )


def load_verified(
    path: Place, unverified: Checkpoint, backend: Backend, config: Config, data: JobData = NO_DATA
) -> tuple[Checkpoint, bool, list[str]]:
    """Collective. Verify the checkpoint, compare the data with it and load its weights.

    Args:
        path: what the user named: a checkpoint, or a run for its newest good one.
        unverified: the checkpoint that was found there.
        backend: the backend, built.
        config: the job's config. Its ``ema_decay`` says whether the moving average of the weights is taken.
        data: the data to compare with those of the checkpoint, if any.

    Returns:
        The checkpoint, whether the moving average of its weights was taken, and notes on both.
    """
    states: list[PortableState] = []  # rank 0's alone: it does not travel as an object

    def read() -> tuple[Checkpoint, bool, list[str]]:
        found = checkpoint_config.verified(path, unverified.manifest)
        notes = [*found.notes(), *compare_with_checkpoint(found, data, config)]
        state, is_ema = read_weights(found, prefer_ema=config.ema_decay is not None)
        states.append(state)
        return found, is_ema, notes

    found, is_ema, notes = run_on_rank_zero(backend.workers, read, doing="reading the checkpoint")
    load_weights(found, backend, states.pop() if states else None)
    return found, is_ema, [*notes, *changed_outputs(found, backend, config, is_ema)]


def _report(done: _Done, output: Place | None) -> None:
    """Show the metrics and append them to a file.

    Raises:
        EnvironmentFault: If the file that the user named cannot be written.
    """
    console = open_console()
    console.print(done.describe(), highlight=False, markup=False, soft_wrap=True)
    for note in done.notes:
        print_note(console, note)
    path = output or place_in(run_place_of(done.checkpoint), EVALUATIONS_FILE)
    problem = _append(path, to_json(done.as_dict()) + "\n", follow=output is not None)
    if problem and output is not None:
        raise EnvironmentFault(
            f"cannot write {shown(path)}: {problem}", "The metrics above are all there is."
        )
    if problem:
        print_note(console, f"cannot write {shown(path)}: {problem}; --output names another file")


def print_note(console: Console, text: str) -> None:
    """Show something that the user should know, such as a warning."""
    console.print(f"note: {text}", highlight=False, markup=False, soft_wrap=True, style="yellow")


def _append(path: Place, line: str, follow: bool) -> str:
    """Append a line to a file; say what went wrong, if something did."""
    try:
        if isinstance(path, str):
            append_line(path, line.encode())
            return ""
        file = AppendFile(path, follow)
    except OSError as error:
        return error.strerror or str(error)
    problem = file.append(line.encode())
    file.close()
    return "" if problem is None else problem.strerror or str(problem)
