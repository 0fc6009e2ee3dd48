"""The command line. Options of a job are config fields, written with dashes."""

import difflib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import click

import hvdtrain
from hvdtrain.bench.options import BenchOptions, bench_options, take_options
from hvdtrain.bench.predict_options import PlanOptions, plan_options
from hvdtrain.cli_options import NULL, ExpandedPath, FieldChoice, JobCommand, OrNull
from hvdtrain.config import Config, Layer, is_nullable
from hvdtrain.config_layers import parse_assignments, read_file
from hvdtrain.errors import Interrupted, Removed, Stopped, UsageError
from hvdtrain.frameworks import FRAMEWORKS
from hvdtrain.jobs.export_formats import EXPORT_FORMATS
from hvdtrain.printable import printable
from hvdtrain.schedule import Cadence

# config fields that have their own option; --set sets any field
OPTIONS = (
    "framework", "task", "epochs", "steps", "batch_size", "global_batch_size", "accumulate",
    "learning_rate", "lr_scaling", "base_batch_size", "rescale_epochs", "lr_schedule", "warmup_epochs",
    "warmup_steps", "optimizer",
    "weight_decay", "momentum", "clip_norm", "compression", "sync_every", "outer_optimizer",
    "outer_learning_rate", "outer_momentum", "label_smoothing", "ema_decay", "early_stopping",
    "precision", "sync_batch_norm", "checkpoint_activations", "compile", "device", "read_workers",
    "on_bad_sample", "check_data", "on_changed_data", "seed", "run_dir", "resume", "init", "init_only",
    "init_skip", "log_every", "eval_every", "save_every", "keep_last", "keep_best", "on_save_error",
    "stall_timeout", "profile",
)  # fmt: skip


class _TrainByDefault(click.Group):
    """A group in which the command ``train`` may be left out."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        first = args[0] if args else ""
        if first not in self.commands and first not in ("--help", "--version"):
            if first and not first.startswith("-") and "." not in first and not Path(first).exists():
                close = difflib.get_close_matches(first, self.commands, n=1)
                hint = f"Did you mean {close[0]!r}? " if close else ""
                raise UsageError(
                    f"{first!r} is neither a command nor a config file",
                    f"{hint}Commands: {', '.join(self.commands)}. Options start with --.",
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

    Without a launcher, a single worker trains. Options take precedence over --set, --set over
    CONFIG.yaml, and CONFIG.yaml over the task's defaults.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap


def _ssh_options(command: Any) -> Any:
    """Add the options on how to reach other hosts."""
    command = click.option("--ssh-identity-file", type=ExpandedPath(), help="Private key for ssh.")(command)
    port = click.IntRange(1, 65535)
    return click.option("--ssh-port", type=port, help="Port of sshd on the other hosts.")(command)


def _config_options(*names: str, defaults: bool = True) -> Callable[[Any], Any]:
    """Return a decorator that adds the options of these config fields, and --set and --debug.

    Args:
        names: config fields.
        defaults: whether the help texts show the fields' defaults.
    """

    def decorate(command: Any) -> Any:
        command = click.option("--debug", is_flag=True, help="Show the traceback of errors.")(command)
        command = click.option(
            "--set",
            "assignments",
            multiple=True,
            metavar="KEY=VALUE",
            help="Set any config field (YAML value).",
        )(command)
        for name in reversed(names):
            command = _config_option(name, defaults)(command)
        return command

    return decorate


def _config_option(name: str, show_default: bool) -> Callable[[Any], Any]:
    field = Config.model_fields[name]
    has_default = show_default and field.default not in (None, ()) and not field.is_required()
    default = f" [{field.default}]" if has_default else ""
    kind, metavar = _option_type(name, field.annotation)
    extra: Any = {"is_flag": False, "flag_value": "auto"} if name == "resume" else {}
    flag, help_text = f"--{name.replace('_', '-')}", f"{field.description}{default}"
    if get_origin(field.annotation) is tuple:  # given once for each part
        return click.option(flag, name, multiple=True, metavar="PATTERN", help=help_text)
    if field.annotation is bool:
        return click.option(f"{flag}/--no-{flag[2:]}", name, default=None, help=field.description)
    return click.option(flag, name, type=kind, metavar=metavar, help=help_text, **extra)


def _option_type(name: str, annotation: Any) -> tuple[Any, str | None]:
    """Return the click type and metavar of a config field; the config checks ranges."""
    kinds = [kind for kind in get_args(annotation) if kind is not type(None)] or [annotation]
    if name == "framework":
        return FieldChoice(list(FRAMEWORKS)), None
    if get_origin(annotation) is Literal:
        return FieldChoice(get_args(annotation)), None
    kind: Any = {int: click.INT, float: click.FLOAT}.get(kinds[0], click.STRING)
    metavar = {"resume": "[auto|PATH]", "profile": "FIRST-LAST"}.get(name)
    if Cadence in kinds or annotation is Cadence or name.endswith("_every"):
        kind, metavar = click.STRING, "STEPS|Nepoch"
    return (OrNull(kind) if is_nullable(name) else kind), metavar


def _layers(assignments: tuple[str, ...], options: dict[str, Any]) -> list[Layer]:
    given = {
        name: None if value is NULL else value for name, value in options.items() if value not in (None, ())
    }
    return [parse_assignments(assignments), Layer("options", given)]


@cli.command(cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@_config_options(*OPTIONS)
@click.option("--check", is_flag=True, help="Stop before the first step, with a summary; write nothing.")
def train(
    config_file: Path | None, check: bool, assignments: tuple[str, ...], debug: bool, **options: Any
) -> None:
    """Train a task. This is the default command."""
    from hvdtrain.jobs.check import check_job
    from hvdtrain.jobs.train import run_job

    layers = [*([read_file(config_file)] if config_file else []), *_layers(assignments, options)]
    if check:
        check_job(layers)
    else:
        run_job(layers)


@cli.command(cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@bench_options
@_config_options(*OPTIONS)
def bench(config_file: Path | None, assignments: tuple[str, ...], debug: bool, **options: Any) -> None:
    """Measure how fast a job trains, and what its steps wait for.

    \b
    horovodrun -np 2 python -m hvdtrain bench [CONFIG.yaml] --framework torch|tf [OPTIONS]
    python -m hvdtrain bench --sweep 1,2,4 --framework torch [OPTIONS]
    python -m hvdtrain bench --against ddp --framework torch [OPTIONS]

    It takes the options of train and leaves no run directory behind.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap
    from hvdtrain.bench.command import run_bench

    chosen, fields = take_options(options, BenchOptions)
    run_bench([*([read_file(config_file)] if config_file else []), *_layers(assignments, fields)], chosen)


@cli.command(cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@plan_options
@_config_options(*OPTIONS)
def plan(config_file: Path | None, assignments: tuple[str, ...], debug: bool, **options: Any) -> None:
    """Predict how fast a job trains with more hosts, from a measurement of a few workers.

    \b
    python -m hvdtrain plan --hosts 32 --framework torch|tf [CONFIG.yaml] [OPTIONS]
    horovodrun -np 8 -H host1:4,host2:4 python -m hvdtrain plan --hosts 32 --framework torch [OPTIONS]
    python -m hvdtrain plan --from plan.json --link 25gbit

    Without a launcher it launches jobs on this host, over each controller, with a worker for each core and
    with half as many, and predicts for the links of --link. Under a launcher it measures that job: on several
    hosts with their network. It takes the options of train and leaves no run directory behind.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap
    from hvdtrain.bench.predict_command import run_plan

    chosen, fields = take_options(options, PlanOptions)
    run_plan([*([read_file(config_file)] if config_file else []), *_layers(assignments, fields)], chosen)


@cli.command(cls=JobCommand)
@click.argument("checkpoint", type=ExpandedPath())
@_config_options("framework", "task", "device", "on_changed_data", defaults=False)
@click.option("--output", type=ExpandedPath(), metavar="FILE",
              help="JSON Lines file to append to; RUN_DIR/evaluations.jsonl if not given.")  # fmt: skip
def evaluate(
    checkpoint: Path, output: Path | None, assignments: tuple[str, ...], debug: bool, **options: Any
) -> None:
    """Evaluate a checkpoint.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint. Evaluation
    works with any number of workers and in either framework. Fields that are not given have the values
    of the checkpoint.
    """
    from hvdtrain.jobs.evaluate import evaluate_checkpoint

    evaluate_checkpoint(checkpoint, _layers(assignments, options), output=output)


@cli.command(cls=JobCommand)
@click.argument("checkpoint", type=ExpandedPath())
@click.option(
    "--to",
    "format_name",
    required=True,
    type=click.Choice(list(EXPORT_FORMATS)),
    help="Export format, which determines the framework.",
)
@click.option("--output", type=ExpandedPath(), metavar="PATH",
              help="Path to write to; RUN_DIR/exports if not given.")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing export.")
@_config_options("task", defaults=False)
def export(
    checkpoint: Path,
    *,
    format_name: str,
    output: Path | None,
    force: bool,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Export a checkpoint's model for serving.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint. The export is
    loaded back and compared with the model.
    """
    from hvdtrain.jobs.export import export_checkpoint

    done = export_checkpoint(checkpoint, format_name, _layers(assignments, options), output, force)
    click.echo(printable(done.describe()))


@cli.command(cls=JobCommand)
@click.argument("checkpoint", type=ExpandedPath())
@click.option("--output", required=True, type=ExpandedPath(), metavar="FILE",
              help="File to write to, .npz or .parquet.")  # fmt: skip
@click.option("--split", type=click.Choice(["train", "eval", "predict"]),
              help="Data of the task. [predict_data() if the task has it, else eval]")  # fmt: skip
@click.option("--force", is_flag=True, help="Replace an existing file.")
@_config_options("framework", "task", "device", "on_changed_data", defaults=False)
def predict(
    checkpoint: Path,
    *,
    output: Path,
    split: str | None,
    force: bool,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Write a model's outputs for every sample to a file.

    CHECKPOINT is a checkpoint directory, or a run directory for its newest good checkpoint. Prediction works
    with any number of workers and in either framework. The rows have the order of the task's data.
    """
    from hvdtrain.jobs.predict import predict_checkpoint

    predict_checkpoint(checkpoint, _layers(assignments, options), output, split, force)


@cli.command("import", cls=JobCommand)
@click.argument("weights", type=ExpandedPath())
@click.option("--output", required=True, type=ExpandedPath(), metavar="DIR",
              help="Directory to write the checkpoint to.")  # fmt: skip
@click.option("--only", multiple=True, metavar="PATTERN",
              help="Take only the weights whose name matches, here or in the file.")  # fmt: skip
@click.option("--skip", multiple=True, metavar="PATTERN",
              help="Leave out the weights whose name matches.")  # fmt: skip
@_config_options("framework", "task", "seed")
def import_(
    weights: Path,
    *,
    output: Path,
    only: tuple[str, ...],
    skip: tuple[str, ...],
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Convert PyTorch or Keras weights to a checkpoint.

    WEIGHTS is a file that PyTorch or Keras saved. Training starts from the checkpoint with --init.
    """
    from hvdtrain.backends.choice import Choice
    from hvdtrain.jobs.import_weights import import_weights

    choice = Choice(only, skip, options=("--only", "--skip"))
    done = import_weights(weights, _layers(assignments, options), output, choice)
    click.echo(printable(done.describe()))


@cli.command()
@click.argument("run_dirs", nargs=-1, required=True, type=ExpandedPath())
def compare(run_dirs: tuple[Path, ...]) -> None:
    """Compare runs: results in a table, and what differs in their configs."""
    from hvdtrain.reporting.compare import print_table

    print_table(run_dirs)


@cli.command()
@click.option("--hostfile", type=ExpandedPath(), metavar="FILE",
              help="Check the hosts of this host file over ssh, before a launch.")  # fmt: skip
@click.option("-H", "--hosts", metavar="HOSTS", help="The same for hosts given as host1:2,host2:2.")
@click.option("--host-discovery-script", metavar="SCRIPT",
              help="Check the discovery script of an elastic job, and the hosts that it prints.")  # fmt: skip
@click.option("--slots-per-host", type=click.IntRange(1), default=1,
              help="Slots of a host for which the script prints no number. [1]")  # fmt: skip
@click.option("--framework", type=click.Choice(list(FRAMEWORKS)), help="Check this framework only. [both]")
@click.option("--run-dir", default="runs", help="Run directory to check. [runs]")
@click.option("--quick", is_flag=True, help="Skip the speed measurements.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of a table.")
@click.option("--timeout", type=click.FloatRange(1), default=60.0, metavar="SECONDS",
              help="Time limit for loading the frameworks on a host. [60]")  # fmt: skip
@_ssh_options
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
@click.option("--agent", is_flag=True, hidden=True)
def doctor(debug: bool, **options: Any) -> None:
    """Check this host or all hosts of a job.

    It checks the local host, the hosts of --hostfile or --hosts over ssh, or, under a launcher, the hosts
    of the job.
    """
    from hvdtrain.doctor.command import run_doctor

    sys.exit(run_doctor(options))


@cli.command(context_settings={"allow_interspersed_args": False})
@click.option("-np", "--num-proc", type=int, metavar="N",
              help="Workers to start with. [the tasks of Slurm's allocation]")  # fmt: skip
@click.option("--min-np", "--min-num-proc", "least", type=int, metavar="N",
              help="With fewer workers, training waits. [-np]")  # fmt: skip
@click.option("--max-np", "--max-num-proc", "most", type=int, metavar="N",
              help="The job never has more workers. [-np]")  # fmt: skip
@click.option("--start-timeout", type=float, metavar="SECONDS",
              help="How long the job waits at the start for -np workers. [60]")  # fmt: skip
@click.option("--elastic-timeout", type=float, metavar="SECONDS",
              help="How long training waits with too few workers. [600]")  # fmt: skip
@click.option("--reset-limit", type=int, metavar="N", help="After more failures the job ends. [none]")
@click.option("--network-interfaces", default="", metavar="NAMES", help="Interfaces of the job. [all]")
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def elastic(command: tuple[str, ...], debug: bool, **options: Any) -> None:
    """Run an elastic job whose workers another launcher starts.

    COMMAND starts all workers, such as srun --kill-on-bad-exit=0 --no-kill --wait=0 python -m hvdtrain ...
    If horovodrun starts them, give --min-np to horovodrun instead.
    """
    from hvdtrain.elastic.limits import LimitOptions, workers_of_slurm
    from hvdtrain.elastic.step import run_step

    wanted = options["num_proc"] or workers_of_slurm(os.environ)
    if wanted is None:
        raise UsageError("the number of workers is not known", "Give -np N: the workers that COMMAND starts.")
    names = ("least", "most", "start_timeout", "elastic_timeout", "reset_limit")
    given = LimitOptions(wanted, **{name: options[name] for name in names})
    interfaces = [name for name in options["network_interfaces"].split(",") if name]
    sys.exit(run_step(command, given, interfaces))


@cli.command()
@click.option("--framework", type=click.Choice([*FRAMEWORKS, "both"]), default="both",
              help="Framework to drill. [both]")  # fmt: skip
@click.option("-H", "--hosts", metavar="HOSTS", help="Hosts and their slots, such as host1:2,host2:2.")
@click.option("--hostfile", type=ExpandedPath(), metavar="FILE", help="The same from a host file.")
@click.option("--workers", type=click.IntRange(2, 64), help="Number of workers. [all slots; 3 on this host]")
@click.option("--hosts-may-fail", is_flag=True,
              help="Also cut off the last host for 45 seconds, with iptables.")  # fmt: skip
@click.option("--folder", default="drill", help="Folder for the runs, which all hosts share. [drill]")
@click.option("--keep", is_flag=True, help="Keep the runs, also if nothing was lost.")
@click.option("--json", "json_path", type=ExpandedPath(), metavar="FILE", help="Write a JSON document, too.")
@_ssh_options
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
def drill(debug: bool, **options: Any) -> None:
    """Kill, freeze and stop workers of short jobs, and check that nothing is lost.

    An undisturbed run is followed by the same run disturbed in each way. The table shows how long training
    paused. The exit code is 4 if a step or a sample was lost or done twice.
    """
    from hvdtrain.drill.command import run_drill

    sys.exit(run_drill(options))


@cli.command("build-horovod")
@click.option("--frameworks", type=click.Choice(["auto", "torch", "tf", "both"]), default="auto",
              help="Frameworks to build for; auto: those installed. [auto]")  # fmt: skip
@click.option("--mpi", type=click.Choice(["auto", "require", "none"]), default="auto",
              help="auto: with MPI if its compiler is found; none: with Gloo only. [auto]")  # fmt: skip
@click.option(
    "--gpu", type=click.Choice(["none", "nccl"]), default="none", help="nccl: build for CUDA GPUs. [none]"
)
@click.option(
    "--jobs", type=click.IntRange(0), default=0, help="Parallel compilations; 0: by cores and memory. [0]"
)
@click.option("--force", is_flag=True, help="Build even if it is installed or cached.")
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
def build_horovod(debug: bool, **request: Any) -> None:
    """Build Horovod for the installed frameworks."""
    from hvdtrain.horovod_build import BuildRequest, build_horovod

    click.echo(f"Horovod {build_horovod(BuildRequest(**request), click.echo).describe()}")


def main() -> None:
    """Run the command line and exit with a code that hvdtrain.errors lists."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:
        if _reports(error):
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (Interrupted, Stopped, Removed, Exception) as error:
        from hvdtrain.jobs.failures import end_worker, is_debugging

        end_worker(error, is_debugging())


def _reports(error: click.ClickException) -> bool:
    """Return whether this worker reports an error of the command line, which all of them have."""
    from hvdtrain.host.launcher import is_elastic
    from hvdtrain.host.launches import output_rank

    if not is_elastic():
        return not output_rank()
    from hvdtrain.elastic.telling import tell_driver

    return tell_driver(error) is error
