"""The commands ``lr-find`` and ``batch-find``."""

import json
from pathlib import Path
from typing import Any

import click

from hvdtrain.config import Layer
from hvdtrain.errors import EnvironmentFault
from hvdtrain.host.launcher import check_is_not_launched, launched_rank, open_console, output_rank
from hvdtrain.jobs.opening.setup import check_may_be_elastic
from hvdtrain.storage.text import printable
from hvdtrain.tools.bench.job import said_if_interrupted
from hvdtrain.tools.bench.options import check_writable, config_files
from hvdtrain.tools.bench.picture import check_picture, new_figure, save_figure
from hvdtrain.tools.search.batch_find import run_batch_find
from hvdtrain.tools.search.learning_rates import draw_rates
from hvdtrain.tools.search.lr_find import checked_rise, find_rates
from hvdtrain.tools.search.options import BatchOptions, RateOptions


def run_lr_find(layers: list[Layer], options: RateOptions) -> None:
    """Collective. Find a learning rate, show what was found, and write it where the options say.

    Raises:
        HvdtrainError: as training would raise it.
    """
    rise = checked_rise(options.lowest_rate, options.highest_rate, options.rising_steps)
    if not launched_rank():
        check_writable(options.json_path, options.picture, read=config_files(layers))
        if options.picture is not None:
            check_picture(options.picture)
    with said_if_interrupted(_say):
        found = find_rates(layers, rise)
    if not output_rank():
        _show(found.describe(), found.to_document(), options.json_path, options.picture)


def run_batch_find_command(layers: list[Layer], options: BatchOptions) -> None:
    """Find a micro-batch, show what was found, and write it where the options say.

    Raises:
        UsageError: If a launcher started this process, or the job would be refused.
        EnvironmentFault: If the job fails as it is.
    """
    check_may_be_elastic(None)
    check_is_not_launched("batch-find", "-np N ...")
    check_writable(options.json_path, read=config_files(layers))
    with said_if_interrupted(_say):
        found = run_batch_find(layers, options, _say)
    _show(found.describe(), found.to_document(), options.json_path)


def _say(text: str) -> None:
    click.echo(printable(text), err=True)


def _show(text: str, document: dict[str, Any], json_path: Path | None, picture: Path | None = None) -> None:
    """Show what was found, then write it: if it cannot be written, it is shown at least.

    Raises:
        EnvironmentFault: If a file cannot be written.
    """
    open_console().print(printable(text), highlight=False, markup=False, soft_wrap=True)
    path = json_path
    try:
        if json_path is not None:
            json_path.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        if picture is not None:
            path, figure = picture, new_figure()
            draw_rates(figure, document)
            save_figure(figure, picture)
    except OSError as error:
        raise EnvironmentFault(
            f"{path} cannot be written: {error.strerror or error}", "What was found stands above."
        ) from None
