"""The command ``plan``: what more hosts would bring, from a measurement of a few workers."""

import json
from collections.abc import Sequence
from pathlib import Path

import click

from hvdtrain.bench.before_launch import check_before_launch
from hvdtrain.bench.interruption import said_if_interrupted
from hvdtrain.bench.picture import check_picture, draw
from hvdtrain.bench.predict_cluster import check_cluster
from hvdtrain.bench.predict_evidence import Evidence, evidence_of, read_evidence
from hvdtrain.bench.predict_options import PlanOptions
from hvdtrain.bench.predict_result import make_plan
from hvdtrain.bench.predict_scope import check_predictable, check_task
from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.host.launcher import launched_rank, open_console
from hvdtrain.host.launches import stated_launch
from hvdtrain.jobs.setup import check_may_be_elastic, settle
from hvdtrain.printable import printable


def run_plan(layers: list[Layer], options: PlanOptions) -> None:
    """Measure, predict, show it, and write it where the options say.

    Under a launcher its workers are measured; without one, jobs on this host are launched.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.

    Raises:
        UsageError: If options contradict each other, the job has what a plan does not predict, or the
            launcher started an elastic job.
        EnvironmentFault: If a file cannot be written.
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    launch = stated_launch()
    launched = launched_rank() is not None or (launch is not None and launch.size > 1)
    options.check(launched=launched)
    if not launched_rank():
        options.check_files(layers)
        if options.picture is not None:
            check_picture(options.picture)
    with said_if_interrupted(_say):
        evidence = _evidence(layers, options, launched=launched)
    if not evidence:
        return
    plan = make_plan(evidence, options)
    open_console().print(plan.describe(), highlight=False, markup=False, soft_wrap=True)
    document = plan.to_document()
    try:
        if options.json_path is not None:
            options.json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if options.picture is not None:
            draw(document, options.picture)
    except OSError as error:
        raise EnvironmentFault(
            f"{error.filename or 'a file'} cannot be written: {error.strerror or error}",
            "What was predicted stands above.",
        ) from None


def _evidence(layers: list[Layer], options: PlanOptions, *, launched: bool) -> list[Evidence]:
    """Collective under a launcher. Return the measurements; none on ranks other than 0."""
    if options.source is not None:
        check_is_measured(layers, options.source)
        return read_evidence(options.source)
    if launched:
        from hvdtrain.bench.predict_measure import measure_job

        record = measure_job(
            layers, options.train_seconds, lambda hosts, slots: check_cluster(hosts, slots, options)
        )
        return [] if record is None else [evidence_of(record)]
    if not any(layer.values.get("framework") for layer in layers):
        raise UsageError("no framework is given", "Add --framework torch or --framework tf.")
    from hvdtrain.bench.predict_launch import count_gpus, measure_here

    task_class, config = settle(layers)  # what is wrong is said before workers are started
    check_predictable(config)
    check_task(config, task_class)
    check_before_launch(config, (), options.controller)
    gpus = 0 if config.device == "cpu" else count_gpus(config.framework)
    return measure_here(layers, options, _say, gpus=gpus)


def check_is_measured(layers: Sequence[Layer], source: Path) -> None:
    """Check that no field of the job is given where nothing is measured.

    Raises:
        UsageError: naming those that are.
    """
    given = sorted({name for layer in layers for name in layer.values})
    if given:
        raise UsageError(
            f"--from {source} has the measurements of a job as it was: {', '.join(given)} cannot be changed",
            "Leave the options of the job out, or measure again without --from.",
        )


def _say(text: str) -> None:
    click.echo(printable(text), err=True)
