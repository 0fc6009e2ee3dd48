"""The command line: options are config fields, spelled with dashes, and nothing more."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

import hvdtrain
from hvdtrain.config import Config, Layer, parse_assignments, read_file
from hvdtrain.errors import Interrupted, Stopped, UsageError
from hvdtrain.forms import FORMS
from hvdtrain.schedule import Cadence

# config fields that have an option of their own; --set reaches all of them
OPTIONS = (
    "framework", "task", "epochs", "steps", "batch_size", "global_batch_size", "accumulate",
    "learning_rate", "lr_scaling", "base_batch_size", "lr_schedule", "warmup_epochs", "optimizer",
    "weight_decay", "momentum", "clip_norm", "compression", "label_smoothing", "ema_decay", "early_stopping",
    "precision", "sync_batch_norm", "checkpoint_activations", "compile", "device", "read_workers",
    "on_bad_sample", "seed", "run_dir", "resume", "init", "log_every", "eval_every", "save_every",
    "keep_last", "keep_best", "on_save_error",
)  # fmt: skip


class _TrainByDefault(click.Group):
    """A group whose first word may be left out when it is ``train``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in self.commands and first not in ("--help", "--version"):
            if first and not first.startswith("-") and "." not in first and not Path(first).exists():
                raise UsageError(
                    f"{first!r} is neither a command nor a config file",
                    f"Commands: {', '.join(self.commands)}. Options start with --.",
                )
            args = ["train", *args]
        return super().parse_args(ctx, args)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        super().format_options(ctx, formatter)
        with formatter.section("Options of train, the default command"):
            rows = [row for option in train.params if (row := option.get_help_record(ctx))]
            formatter.write_dl(rows)


@click.group(
    cls=_TrainByDefault, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100}
)
@click.version_option(hvdtrain.__version__, prog_name="hvdtrain")
def cli() -> None:
    """Train PyTorch and TensorFlow (Keras 3) models on any number of hosts, over Horovod.

    \b
    horovodrun -np 4 python -m hvdtrain [CONFIG.yaml] --framework torch|tf [OPTIONS]
    horovodrun -np 16 -H host1:8,host2:8 python -m hvdtrain --framework torch

    Without a launcher, one worker trains. Options go before --set, --set before CONFIG.yaml, that
    before the task's defaults.
    """  # noqa: D301 - click takes a backspace as the start of lines to be left as they are


def _config_options(*names: str) -> Callable[[Any], Any]:
    """Give a decorator that adds the options of these config fields, --set and --debug."""

    def decorate(command: Any) -> Any:
        command = click.option("--debug", is_flag=True, help="Show the traceback of every error.")(command)
        command = click.option(
            "--set", "assignments", multiple=True, metavar="KEY=VALUE", help="Any config field; YAML value."
        )(command)
        for name in reversed(names):
            command = _config_option(name)(command)
        return command

    return decorate


def _config_option(name: str) -> Callable[[Any], Any]:
    field = Config.model_fields[name]
    default = None if field.default is None or field.is_required() else f" [{field.default}]"
    kind, metavar = _option_type(name, field.annotation)
    extra: Any = {"is_flag": False, "flag_value": "auto"} if name == "resume" else {}
    flag, help_text = f"--{name.replace('_', '-')}", f"{field.description}{default or ''}"
    if field.annotation is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=field.description)
    return click.option(flag, name, type=kind, metavar=metavar, help=help_text, **extra)


def _option_type(name: str, annotation: Any) -> tuple[Any, str | None]:
    """Give a click type and a metavar for a config field; ranges are the config's to check."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    if get_origin(annotation) is Literal:
        return click.Choice(get_args(annotation)), None
    if Cadence in kinds or annotation is Cadence or name.endswith("_every"):
        return str, "STEPS|Nepoch"
    if name == "resume":
        return str, "[auto|PATH]"
    return {int: click.INT, float: click.FLOAT}.get(kinds[0], click.STRING), None


def _layers(assignments: tuple[str, ...], options: dict[str, Any]) -> list[Layer]:
    given = {name: value for name, value in options.items() if value is not None}
    return [parse_assignments(assignments), Layer("options", given)]


@cli.command()
@click.argument("config_file", required=False, type=click.Path(path_type=Path))
@_config_options(*OPTIONS)
def train(config_file: Path | None, assignments: tuple[str, ...], debug: bool, **options: Any) -> None:
    """Train a task (the default command)."""
    from hvdtrain.job import run_job

    run_job([*([read_file(config_file)] if config_file else []), *_layers(assignments, options)])


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@_config_options("framework", "task", "device")
@click.option("--output", type=click.Path(path_type=Path), metavar="FILE",
              help="File of JSON lines (evaluations.jsonl in the run directory if not given).")  # fmt: skip
def evaluate(
    checkpoint: Path, output: Path | None, assignments: tuple[str, ...], debug: bool, **options: Any
) -> None:
    """Evaluate a checkpoint, or a run's newest: alone or under a launcher, in either framework."""
    from hvdtrain.evaluation import evaluate_checkpoint

    evaluate_checkpoint(checkpoint, _layers(assignments, options), output=output)


@cli.command()
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option(
    "--to", "form", required=True, type=click.Choice(list(FORMS)), help="Form; the framework follows."
)
@click.option("--output", type=click.Path(path_type=Path), metavar="PATH",
              help="Where to (exports/ in the run directory if not given).")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an export that is there.")
@_config_options("task")
def export(
    checkpoint: Path,
    *,
    form: str,
    output: Path | None,
    force: bool,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Export a checkpoint's model in a form that others serve; it is loaded back and compared."""
    from hvdtrain.export import export_checkpoint

    done = export_checkpoint(checkpoint, form, _layers(assignments, options), output, force)
    click.echo(done.in_words())


@cli.command("import")
@click.argument("weights", type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), metavar="DIR",
              help="Folder that the checkpoint goes into.")  # fmt: skip
@_config_options("framework", "task", "seed")
def import_(weights: Path, output: Path, assignments: tuple[str, ...], debug: bool, **options: Any) -> None:
    """Make a checkpoint of weights that PyTorch or Keras saved, for --init."""
    from hvdtrain.importing import import_weights

    click.echo(import_weights(weights, _layers(assignments, options), output).in_words())


@cli.command()
@click.argument("run_dirs", nargs=-1, required=True, type=click.Path(path_type=Path))
def compare(run_dirs: tuple[Path, ...]) -> None:
    """Set finished runs side by side in a table."""
    from hvdtrain.compare import print_table

    print_table(run_dirs)


@cli.command()
@click.option("--hostfile", type=click.Path(path_type=Path), metavar="FILE",
              help="Examine these hosts over ssh, before a launch: lines such as host1 slots=2.")  # fmt: skip
@click.option("-H", "--hosts", metavar="HOSTS", help="The same, as in -H host1:2,host2:2.")
@click.option("--framework", type=click.Choice(["torch", "tf"]), help="Look at this one only [both].")
@click.option("--run-dir", default="runs", help="Run directory to look at. [runs]")
@click.option("--quick", is_flag=True, help="Measure no speed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of a table.")
@click.option("--timeout", type=click.FloatRange(1), default=60.0, metavar="SECONDS",
              help="What a host has to load the frameworks. [60]")  # fmt: skip
@click.option("--ssh-port", type=click.IntRange(1, 65535), help="Port of sshd on the other hosts.")
@click.option("--ssh-identity-file", type=click.Path(path_type=Path), help="Private key to log in with.")
@click.option("--debug", is_flag=True, help="Show the traceback of every error.")
@click.option("--agent", is_flag=True, hidden=True)
def doctor(debug: bool, **options: Any) -> None:
    """Examine this host, or all hosts of a job: alone, over ssh (--hostfile), or under a launcher."""
    from hvdtrain.doctor.command import run_doctor

    sys.exit(run_doctor(options))


@cli.command("build-horovod")
@click.option("--frameworks", type=click.Choice(["auto", "torch", "tf", "both"]), default="auto",
              help="Build for these; auto: for what is installed.")  # fmt: skip
@click.option("--mpi", type=click.Choice(["auto", "require", "none"]), default="auto",
              help="auto: with MPI where a compiler for it is found; none: Gloo only.")  # fmt: skip
@click.option("--gpu", type=click.Choice(["none", "nccl"]), default="none", help="nccl: for CUDA machines.")
@click.option(
    "--jobs", type=click.IntRange(0), default=0, help="Parallel compilations; 0: by cores and memory."
)
@click.option("--force", is_flag=True, help="Build although it is installed or cached.")
@click.option("--debug", is_flag=True, help="Show the traceback of every error.")
def build_horovod(debug: bool, **request: Any) -> None:
    """Build and install Horovod for the frameworks that are installed."""
    from hvdtrain.horovod_build import BuildRequest, build_horovod

    click.echo(f"Horovod {build_horovod(BuildRequest(**request), click.echo).describe()}")


def main() -> None:
    """Run the command line and end the process with the exit code that hvdtrain.errors lists."""
    from hvdtrain.terminal import launched_rank

    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        if not launched_rank():
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (Interrupted, Stopped, Exception) as error:
        from hvdtrain.ending import end_worker

        end_worker(error, "--debug" in sys.argv)
