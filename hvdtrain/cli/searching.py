"""Commands that search config fields by jobs of their own."""

from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.fields import OPTIONS, config_options, given_layers
from hvdtrain.config.options import ExpandedPath, JobCommand
from hvdtrain.tools.bench.options import take_options
from hvdtrain.tools.search.options import BatchOptions, RateOptions, batch_options, rate_options


@click.command("lr-find", cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@rate_options
@config_options(*OPTIONS)
def lr_find(config_file: Path | None, assignments: tuple[str, ...], debug: bool, **options: Any) -> None:
    """Suggest a learning rate, from a short training in which it rises until the loss diverges.

    \b
    horovodrun -np 2 python -m hvdtrain lr-find [CONFIG.yaml] --framework torch|tf [OPTIONS]

    It takes the options of train and leaves no run directory behind; the length of the training and its
    schedule do not matter.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap
    from hvdtrain.tools.search.commands import run_lr_find

    chosen, fields = take_options(options, RateOptions)
    run_lr_find(given_layers(assignments, fields, config_file), chosen)


@click.command("batch-find", cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@batch_options
@config_options(*OPTIONS)
def batch_find(config_file: Path | None, assignments: tuple[str, ...], debug: bool, **options: Any) -> None:
    """Find the largest micro-batch that fits into memory, and the fastest one.

    \b
    python -m hvdtrain batch-find -np 2 [CONFIG.yaml] --framework torch|tf [OPTIONS]

    The global batch stays, by more or fewer micro-batches per step, so the curve does not change. Each
    micro-batch is tried by a job of its own. It takes the options of train and leaves no run directory.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap
    from hvdtrain.tools.search.commands import run_batch_find_command

    chosen, fields = take_options(options, BatchOptions)
    layers = given_layers(assignments, fields, config_file)
    run_batch_find_command(layers, chosen)
