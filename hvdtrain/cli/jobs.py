"""Commands that run a job: training, and what begins with a checkpoint or weights."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hvdtrain.cli.fields import OPTIONS, config_options, given_layers
from hvdtrain.config import Layer
from hvdtrain.config.options import ExpandedPath, JobCommand, PathOrUrl
from hvdtrain.config.values import EXPORT_FORMATS
from hvdtrain.storage.text import printable

if TYPE_CHECKING:
    from hvdtrain.jobs.serving.checkpoint import Call


def _best_option(place: str) -> Callable[[Any], Any]:
    text = f"After {place}: take the best checkpoint of the run, by METRIC, or else by keep_best or the loss."
    return click.option("--best", is_flag=False, flag_value="keep_best", metavar="[METRIC]", help=text)


_best = _best_option("CHECKPOINT")


@click.command(cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@config_options(*OPTIONS)
@_best_option("--init RUN")
@click.option("--check", is_flag=True, help="Stop before the first step, with a summary; write nothing.")
def train(
    config_file: Path | None,
    check: bool,
    best: str | None,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Train a task. This is the default command."""
    from hvdtrain.jobs.train import check_job, run_job

    layers = given_layers(assignments, options, config_file)
    if check:
        check_job(layers, best=_chosen(best))
    else:
        run_job(layers, best=_chosen(best))


@click.command(cls=JobCommand)
@click.argument("checkpoint", type=PathOrUrl())
@_best
@config_options("framework", "task", "device", "on_changed_data", defaults=False)
@click.option("--output", type=ExpandedPath(), metavar="FILE",
              help="JSON Lines file to append to. [RUN_DIR/evaluations.jsonl; none at a URL]")  # fmt: skip
def evaluate(
    checkpoint: Path | str,
    output: Path | None,
    best: str | None,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Evaluate a checkpoint.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint, or a URL of one.
    Evaluation works with any number of workers and in either framework. Fields that are not given have the
    values of the checkpoint.
    """
    from hvdtrain.jobs.serving.evaluate import evaluate_checkpoint

    evaluate_checkpoint(_call(checkpoint, best, given_layers(assignments, options)), output)


@click.command(cls=JobCommand)
@click.argument("checkpoint", type=PathOrUrl())
@_best
@click.option("--to", "format_name", required=True, type=click.Choice(list(EXPORT_FORMATS)),
              help="Export format, which determines the framework.")  # fmt: skip
@click.option("--output", type=ExpandedPath(), metavar="PATH",
              help="Path to write to; RUN_DIR/exports if not given.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing export.")
@config_options("task", defaults=False)
def export(
    checkpoint: Path | str,
    *,
    format_name: str,
    output: Path | None,
    force: bool,
    best: str | None,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Export a checkpoint's model for serving.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint, or a URL of one.
    The export is loaded back and compared with the model.
    """
    from hvdtrain.jobs.serving.export import export_checkpoint

    done = export_checkpoint(
        _call(checkpoint, best, given_layers(assignments, options)), format_name, output, force
    )
    click.echo(printable(done.describe()))


@click.command(cls=JobCommand)
@click.argument("checkpoint", type=PathOrUrl())
@_best
@click.option("--output", required=True, type=ExpandedPath(), metavar="FILE",
              help="File to write to, .npz or .parquet.")  # fmt: skip
@click.option("--split", type=click.Choice(["train", "eval", "predict"]),
              help="Data of the task. [predict_data() if the task has it, else eval]")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
@config_options("framework", "task", "device", "on_changed_data", defaults=False)
def predict(
    checkpoint: Path | str,
    *,
    output: Path,
    split: str | None,
    force: bool,
    best: str | None,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Write a model's outputs for every sample to a file.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint, or a URL of one.
    Prediction works with any number of workers and in either framework. The rows have the order of the task's
    data.
    """
    from hvdtrain.jobs.serving.predict import predict_checkpoint

    predict_checkpoint(_call(checkpoint, best, given_layers(assignments, options)), output, split, force)


@click.command("import", cls=JobCommand)
@click.argument("weights", type=ExpandedPath())
@click.option("--output", required=True, type=ExpandedPath(), metavar="DIR",
              help="Directory to write the checkpoint to.")  # fmt: skip
@config_options("framework", "task", "seed")
def import_(
    weights: Path,
    *,
    output: Path,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Convert PyTorch or Keras weights to a checkpoint.

    WEIGHTS is a file that PyTorch or Keras saved. Training starts from the checkpoint with --init.
    """
    from hvdtrain.jobs.serving.checkpoint import Call
    from hvdtrain.jobs.serving.weights import import_file

    done = import_file(Call(weights, given_layers(assignments, options)), output)
    click.echo(printable(done.describe()))


def _call(checkpoint: Path | str, best: str | None, layers: list[Layer]) -> "Call":
    """Return a checkpoint, of a run the best one if that is wanted, and the layers of its config."""
    from hvdtrain.jobs.serving.checkpoint import Call, chosen_checkpoint

    return Call(chosen_checkpoint(checkpoint, _chosen(best)), layers)


def _chosen(best: str | None) -> bool | str:
    return True if best == "keep_best" else best or False
