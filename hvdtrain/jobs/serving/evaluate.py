"""Evaluating a checkpoint: alone or with many workers, in either framework."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

from hvdtrain.backends.base import Backend
from hvdtrain.checkpoints.storage import Checkpoint
from hvdtrain.config import Config
from hvdtrain.config.train_options import TrainOptions
from hvdtrain.data.eval_sets import sets_of
from hvdtrain.data.training_data import readers_for
from hvdtrain.early_stopping import SEPARATOR, metrics_by_set
from hvdtrain.errors import EnvironmentFault, WorkerFailure
from hvdtrain.host.launcher import muted_console
from hvdtrain.jobs.opening.data_sets import known_size
from hvdtrain.jobs.opening.dry_run import check_alone
from hvdtrain.jobs.opening.start import JobSpec
from hvdtrain.jobs.serving.checkpoint import Call, given_output, open_run, opened, show, show_notes
from hvdtrain.jobs.serving.outputs import PathOrUrl
from hvdtrain.reporting.console import describe_means
from hvdtrain.reporting.jsonl import AppendFile, to_json
from hvdtrain.step_end import evaluate as run_evaluation
from hvdtrain.storage.text import counted, url_of, with_urls
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
    with opened(call, "evaluate") as (job, backend, found):
        done = _evaluate(job, backend, call.place, found)
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


def _evaluate(job: JobSpec, backend: Backend, place: PathOrUrl, unverified: Checkpoint) -> _Done:
    """Collective. Agree, build, load the weights and run the loop's evaluation."""
    run = open_run(job, backend, place, unverified, "eval_data")
    session, data = run.session, run.session.data.evaluation
    check_alone(session, run.task)
    begun = time.perf_counter()
    with (
        task_errors("evaluation failed", WorkerFailure),
        readers_for(job.config, None, data) as session.data.readers,
    ):
        metrics = run_evaluation(session, session.plan())
    seconds = time.perf_counter() - begun
    sizes = {name: known_size(dataset) or 0 for name, dataset in sets_of(data).items()}
    bad = session.data.skipped.count
    return _Done(
        run.found, run.is_ema, job.config, metrics, backend.workers.size, sizes, seconds, bad, run.notes
    )


def _report(done: _Done, output: Path | None) -> None:
    """Show the metrics and append them to a file."""
    show(done.describe(), done.notes)
    if output is None and url_of(done.checkpoint.path):
        return  # a run in a store is not written to
    path = output or done.checkpoint.run_dir / EVALUATIONS_FILE
    try:
        file = AppendFile(path, follow=output is not None)
        problem = file.append((to_json(done.as_dict()) + "\n").encode())
        file.close()
        if problem is not None:
            raise problem
    except OSError as error:
        text = f"cannot write {path}: {error.strerror or error}"
        if output is not None:
            raise EnvironmentFault(text, "The metrics above are all there is.") from None
        show_notes([f"{text}; --output names another file"])
