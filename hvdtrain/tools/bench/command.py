"""The command ``bench``: one job as it was launched, or a sweep over numbers of workers."""

import json
from typing import Any

import click

from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault, UsageError
from hvdtrain.host.launcher import check_is_not_launched, launched_rank, open_console
from hvdtrain.jobs.opening.setup import check_may_be_elastic
from hvdtrain.storage.text import printable
from hvdtrain.tools.bench.job import Request, bench_job, said_if_interrupted
from hvdtrain.tools.bench.message_times import MOST_BYTES
from hvdtrain.tools.bench.options import BenchOptions
from hvdtrain.tools.bench.picture import check_picture, draw


def run_bench(layers: list[Layer], options: BenchOptions) -> None:
    """Measure, show what was found, and write it where the options say.

    Args:
        layers: the job's config values, weakest source first.
        options: the options of the command.

    Raises:
        UsageError: If options contradict each other, a launcher started what launches workers itself, or it
            started an elastic job.
        HvdtrainError: as training would raise it.
    """
    check_may_be_elastic(None)
    try:
        options.check()
    except UsageError as error:
        error.everywhere = True  # every worker has the same command
        raise
    if not launched_rank():
        options.check_files(layers)
        if options.picture is not None:
            check_picture(options.picture)
    if not options.sweep:
        most_bytes = options.max_bytes or MOST_BYTES
        request = Request(options.seconds, options.split, options.all_reduce, most_bytes)
        with said_if_interrupted(_say):
            result = bench_job(layers, request)
        if result is not None:
            _tell(result.describe(), result.to_document(), options)
        return
    check_is_not_launched("bench --sweep")
    from hvdtrain.tools.bench.sweep import run_sweep

    with said_if_interrupted(_say):
        swept = run_sweep(layers, options, _say)
    _tell(swept.describe(), swept.to_document(), options)


def _say(text: str) -> None:
    click.echo(printable(text), err=True)


def _tell(text: str, document: dict[str, Any], options: BenchOptions) -> None:
    """Show what was found, then write it: what cannot be written is shown at least.

    Raises:
        EnvironmentFault: If a file cannot be written.
    """
    open_console().print(text, highlight=False, markup=False, soft_wrap=True)
    path = options.json_path
    try:
        if path is not None:
            path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if options.picture is not None:
            path = options.picture
            draw(document, path)
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written: {error.strerror or error}", "What was measured stands above."
        ) from None
