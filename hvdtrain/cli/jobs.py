"""Commands that run a job, and the options that are config fields, with the layers that they make."""

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin

import click

import hvdtrain
from hvdtrain.config import Config, Layer, is_nullable
from hvdtrain.config.layers import parse_assignments, read_file
from hvdtrain.config.options import GROUPS, NULL, ExpandedPath, FieldChoice, JobCommand, OrNull, PathOrUrl
from hvdtrain.config.values import EXPORT_FORMATS
from hvdtrain.errors import UsageError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.schedule import Cadence
from hvdtrain.storage.text import did_you_mean, printable

if TYPE_CHECKING:
    from hvdtrain.jobs.serving.checkpoint import Call


class _TrainByDefault(click.Group):
    """A group in which the command ``train`` may be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in self.commands and first not in ("--help", "--version"):
            if first and not first.startswith("-") and "." not in first and not Path(first).exists():
                hint = f"{did_you_mean(first, self.commands)} Commands: {', '.join(self.commands)}."
                remedy = f"{hint.lstrip()} Options start with --."
                raise UsageError(f"{first!r} is neither a command nor a config file", remedy)
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        train = self.commands["train"]
        train.format_options(click.Context(train, parent=ctx), formatter)


@click.group(
    cls=_TrainByDefault, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(hvdtrain.__version__, prog_name="hvdtrain")
def cli() -> None:
    """Train PyTorch and TensorFlow (Keras 3) models on any number of hosts, over Horovod.

    \b
    horovodrun -np 4 python -m hvdtrain [CONFIG.yaml] --framework torch|tf [OPTIONS]
    horovodrun -np 16 -H host1:8,host2:8 python -m hvdtrain --framework torch

    Without a launcher, a single worker trains. Options take precedence over --set, --set over
    CONFIG.yaml, and CONFIG.yaml over the task's defaults.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap


# config fields that have their own option; --set sets any field
OPTIONS = tuple(name for names in GROUPS.values() for name in names)


def config_options(*names: str, defaults: bool = True) -> Callable[[Any], Any]:
    """Return a decorator that adds the options of these config fields, and --set and --debug."""

    def decorate(command: Any) -> Any:
        command = click.option("--debug", is_flag=True, help="Show the traceback of errors.")(command)
        command = click.option("--set", "assignments", multiple=True, metavar="KEY=VALUE",
                               help="Set any config field (YAML value).")(command)  # fmt: skip
        for name in reversed(names):
            command = _config_option(name, defaults)(command)
        return command

    return decorate


def _config_option(name: str, show_default: bool) -> Callable[[Any], Any]:
    field = Config.model_fields[name]
    has_default = show_default and field.default not in (None, ()) and not field.is_required()
    default = f" [{field.default}]" if has_default else ""
    kinds = [one for one in get_args(field.annotation) if one is not type(None)] or [field.annotation]
    kind: Any = {int: click.INT, float: click.FLOAT}.get(kinds[0], click.STRING)
    metavar = {"resume": "[auto|PATH]", "profile": "FIRST-LAST", "max_time": "TIME"}.get(name)
    if name == "framework" or get_origin(field.annotation) is Literal:
        kind = FieldChoice(list(FRAMEWORKS) if name == "framework" else get_args(field.annotation))
    elif Cadence in kinds or name.endswith("_every"):
        kind, metavar = click.STRING, "STEPS|Nepoch"
    kind = OrNull(kind) if is_nullable(name) else kind  # the config checks ranges
    extra: Any = {"is_flag": False, "flag_value": "auto"} if name == "resume" else {}
    flag = f"--{name.replace('_', '-')}"
    if get_origin(field.annotation) is tuple:  # given once for each part
        extra, metavar = {"multiple": True}, "NAME" if name == "track" else "PATTERN"
    if field.annotation is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=field.description)
    return click.option(flag, name, type=kind, metavar=metavar, help=f"{field.description}{default}", **extra)


def given_layers(
    assignments: tuple[str, ...], options: dict[str, Any], config_file: Path | None = None
) -> list[Layer]:
    """Return the layers of a configuration that a command line gives, the weakest first."""
    given = {
        name: None if value is NULL else value for name, value in options.items() if value not in (None, ())
    }
    file = [read_file(config_file)] if config_file else []
    return [*file, parse_assignments(assignments), Layer("options", given)]


def _best_option(place: str) -> Callable[[Any], Any]:
    text = f"After {place}: take the best checkpoint of the run, by METRIC, or else by keep_best or the loss."
    return click.option("--best", is_flag=False, flag_value="keep_best", metavar="[METRIC]", help=text)


def _chosen(best: str | None) -> bool | str:
    return True if best == "keep_best" else best or False


@click.command(cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@config_options(*OPTIONS)
@_best_option("--init RUN")
@click.option("--check", is_flag=True, help="Stop before the first step, with a summary; write nothing.")
def train(config_file: Any, check: bool, best: Any, assignments: Any, debug: bool, **options: Any) -> None:
    """Train a task. This is the default command."""
    from hvdtrain.jobs.train import check_job, run_job

    run = check_job if check else run_job
    run(given_layers(assignments, options, config_file), best=_chosen(best))


def _of_checkpoint(*fields: str) -> Callable[[Callable[..., None]], click.Command]:
    """Return a decorator of a command about a checkpoint, with options of these fields and its own ones."""

    def decorate(run: Callable[..., None]) -> click.Command:
        @wraps(run)
        def command(checkpoint: Any, best: Any, assignments: Any, debug: bool, **given: Any) -> None:
            from hvdtrain.jobs.serving.checkpoint import Call, chosen_checkpoint

            layers = given_layers(assignments, {name: given.pop(name) for name in fields})
            run(Call(chosen_checkpoint(checkpoint, _chosen(best)), layers), **given)

        options = _best_option("CHECKPOINT")(config_options(*fields, defaults=False)(command))
        return click.command(cls=JobCommand)(click.argument("checkpoint", type=PathOrUrl())(options))

    return decorate


@_of_checkpoint("framework", "task", "device", "on_changed_data")
@click.option("--output", type=ExpandedPath(), metavar="FILE",
              help="JSON Lines file to append to. [RUN_DIR/evaluations.jsonl; none at a URL]")  # fmt: skip
def evaluate(call: "Call", output: Path | None) -> None:
    """Evaluate a checkpoint.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint, or a URL of one.
    Evaluation works with any number of workers and in either framework. Fields that are not given have the
    values of the checkpoint.
    """
    from hvdtrain.jobs.serving.inference import evaluate_checkpoint

    evaluate_checkpoint(call, output)


@_of_checkpoint("task")
@click.option("--to", "format_name", required=True, type=click.Choice(list(EXPORT_FORMATS)),
              help="Export format, which determines the framework.")  # fmt: skip
@click.option("--output", type=ExpandedPath(), metavar="PATH",
              help="Path to write to; RUN_DIR/exports if not given.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing export.")
def export(call: "Call", format_name: str, output: Path | None, force: bool) -> None:
    """Export a checkpoint's model for serving.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint, or a URL of one.
    The export is loaded back and compared with the model.
    """
    from hvdtrain.jobs.serving.models import export_checkpoint

    click.echo(printable(export_checkpoint(call, format_name, output, force).describe()))


@_of_checkpoint("framework", "task", "device", "on_changed_data")
@click.option("--output", required=True, type=ExpandedPath(), metavar="FILE",
              help="File to write to, .npz or .parquet.")  # fmt: skip
@click.option("--split", type=click.Choice(["train", "eval", "predict"]),
              help="Data of the task. [predict_data() if the task has it, else eval]")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
def predict(call: "Call", output: Path, split: str | None, force: bool) -> None:
    """Write a model's outputs for every sample to a file.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint, or a URL of one.
    Prediction works with any number of workers and in either framework. The rows have the order of the task's
    data.
    """
    from hvdtrain.jobs.serving.inference import predict_checkpoint

    predict_checkpoint(call, output, split, force)


@click.command("import", cls=JobCommand)
@click.argument("weights", type=ExpandedPath())
@click.option("--output", required=True, type=ExpandedPath(), metavar="DIR",
              help="Directory to write the checkpoint to.")  # fmt: skip
@config_options("framework", "task", "seed")
def import_(weights: Path, output: Path, assignments: Any, debug: bool, **options: Any) -> None:
    """Convert PyTorch or Keras weights to a checkpoint.

    WEIGHTS is a file that PyTorch or Keras saved. Training starts from the checkpoint with --init.
    """
    from hvdtrain.jobs.serving.checkpoint import Call
    from hvdtrain.jobs.serving.models import import_file

    done = import_file(Call(weights, given_layers(assignments, options)), output)
    click.echo(printable(done.describe()))
