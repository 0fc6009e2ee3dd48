"""Evaluating a checkpoint: alone or with many workers, in either framework."""

import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Unpack

from hvdtrain.config.train_options import TrainOptions
from hvdtrain.data.eval_sets import metric_prefixes, sets_of
from hvdtrain.data.training_data import readers_for
from hvdtrain.early_stopping import metrics_by_set
from hvdtrain.errors import EnvironmentFault, WorkerFailure
from hvdtrain.host.launcher import muted_console
from hvdtrain.jobs.opening.data_sets import known_size
from hvdtrain.jobs.opening.dry_run import check_alone
from hvdtrain.jobs.serving.checkpoint import Call, OpenRun, given_output, open_run, opened, show
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
