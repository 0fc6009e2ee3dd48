"""Commands around training, which import a tool when they run, and those of hosts."""

import sys
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.jobs import OPTIONS, config_options, given_layers
from hvdtrain.config.options import ExpandedPath, JobCommand
from hvdtrain.errors import UsageError
from hvdtrain.host.frameworks import FRAMEWORKS
from hvdtrain.storage.text import did_you_mean, printable
from hvdtrain.tools.output import options_of, take_options

_debug = click.option("--debug", is_flag=True, help="Show the traceback of errors.")


def _measuring(name: str, folder: str, own: str, runner: str, text: str) -> click.Command:
    """Return the command of a tool that takes the options of train, and its own: ``own``_options."""

    @click.command(name, cls=JobCommand, help=text)
    @click.argument("config_file", required=False, type=ExpandedPath())
    @options_of(f"{folder}.options", f"{own}_options")
    @config_options(*OPTIONS)
    def command(config_file: Any, assignments: Any, debug: Any, **given: Any) -> None:
        kind = getattr(import_module(f"hvdtrain.tools.{folder}.options"), f"{own.capitalize()}Options")
        chosen, fields = take_options(given, kind)
        module, _, function = runner.partition(":")
        run = getattr(import_module(f"hvdtrain.tools.{folder}.{module}"), function)
        run(given_layers(assignments, fields, config_file), chosen)

    return command


lr_find = _measuring(
    "lr-find", "search", "rate", "lr_find:run_lr_find",
    """Suggest a learning rate, from a short training in which it rises until the loss diverges.

    \b
    horovodrun -np 2 python -m hvdtrain lr-find [CONFIG.yaml] --framework torch|tf [OPTIONS]

    It takes the options of train and leaves no run directory behind; the length of the training and its
    schedule do not matter.
    """)  # fmt: skip
batch_find = _measuring(
    "batch-find", "search", "batch", "batch_find:run_batch_find",
    """Find the largest micro-batch that fits into memory, and the fastest one.

    \b
    python -m hvdtrain batch-find -np 2 [CONFIG.yaml] --framework torch|tf [OPTIONS]

    The global batch stays, by more or fewer micro-batches per step, so the curve does not change. Each
    micro-batch is tried by a job of its own. It takes the options of train and leaves no run directory.
    """)  # fmt: skip
bench = _measuring(
    "bench", "bench", "bench", "sweep:run_bench",
    """Measure how fast a job trains, and what its steps wait for.

    \b
    horovodrun -np 2 python -m hvdtrain bench [CONFIG.yaml] --framework torch|tf [OPTIONS]
    python -m hvdtrain bench --sweep 1,2,4 --framework torch [OPTIONS]

    It takes the options of train and leaves no run directory behind.
    """)  # fmt: skip
plan = _measuring(
    "plan", "bench", "plan", "plan:run_plan",
    """Predict how fast a job trains with more hosts, from a measurement of a few workers.

    \b
    python -m hvdtrain plan --hosts 32 --framework torch|tf [CONFIG.yaml] [OPTIONS]
    horovodrun -np 8 -H host1:4,host2:4 python -m hvdtrain plan --hosts 32 --framework torch [OPTIONS]

    Without a launcher it launches jobs on this host, over each controller, with a worker for each core and
    with half as many, and predicts for the links of --link. Under a launcher it measures that job: on several
    hosts with their network. It takes the options of train and leaves no run directory behind.
    """)  # fmt: skip


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=ExpandedPath())
@click.option("--sort", metavar="COLUMN",
              help="Column to sort by, best first: accuracy, 'best loss', seconds.")  # fmt: skip
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, with all digits.")
def compare(run_dirs: tuple[Path, ...], sort: str | None, as_csv: bool) -> None:
    """Compare runs: results in a table, and what differs in their configs.

    A folder that holds run directories, such as runs, stands for all of them.
    """
    from hvdtrain.reporting.compare import print_csv, print_table

    (print_csv if as_csv else print_table)(run_dirs, sort)


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=ExpandedPath())
@click.option("-o", "--output", type=ExpandedPath(), default="report.html", metavar="FILE",
              help="File to write. [report.html]")  # fmt: skip
@click.option("--verify/--no-verify", default=True, help="Check every byte of the checkpoints. [on]")
@_debug
def report(run_dirs: tuple[Path, ...], output: Path, verify: bool, debug: bool) -> None:
    """Draw runs: curves, events, configs and checkpoints in one HTML page.

    The page needs no network. Runs may not have ended. A folder that holds run directories, such as runs,
    stands for all of them.
    """
    from hvdtrain.tools.report.page import write_report

    click.echo(printable(write_report(run_dirs, output, verify)))


@click.command()
@click.argument("run_dir", type=ExpandedPath())
@click.option("--wait", type=click.FloatRange(0), metavar="SECONDS",
              help="How long to wait for a run that is not there yet, or for a stopped or killed one to be "
                   "resumed. [60, and 0 at the start]")  # fmt: skip
@_debug
def watch(run_dir: Path, wait: float | None, debug: bool) -> None:
    """Follow a run from another terminal, or another host that sees its directory.

    It ends when the run ends.
    """
    from hvdtrain.tools.report.watch import follow

    follow(run_dir, wait)


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=ExpandedPath())
@click.option("--to", "names", multiple=True, metavar="NAME",
              help="Tracker: mlflow or wandb. [those of the run's config]")  # fmt: skip
@click.option("--checkpoints", is_flag=True, help="Send the newest checkpoint, too.")
@_debug
def track(run_dirs: tuple[Path, ...], names: tuple[str, ...], checkpoints: bool, debug: bool) -> None:
    """Send runs to trackers: what a job could not send, or runs that were never tracked."""
    from hvdtrain.jobs.track import track_runs

    track_runs(run_dirs, names, checkpoints, lambda text: click.echo(printable(text)))


def _ssh_options(command: Any) -> Any:
    """Add the options on how to reach other hosts."""
    command = click.option("--ssh-identity-file", type=ExpandedPath(), help="Private key for ssh.")(command)
    port = click.IntRange(1, 65535)
    return click.option("--ssh-port", type=port, help="Port of sshd on the other hosts.")(command)


@click.command()
@click.option("--hostfile", type=ExpandedPath(), metavar="FILE",
              help="Check the hosts of this host file over ssh, before a launch.")  # fmt: skip
@click.option("-H", "--hosts", metavar="HOSTS", help="The same for hosts given as host1:2,host2:2.")
@click.option("--host-discovery-script", metavar="SCRIPT",
              help="The same for the hosts that an elastic job's discovery script prints.")  # fmt: skip
@click.option("--slots-per-host", type=click.IntRange(1), default=1,
              help="Slots of a host for which the script prints no number. [1]")  # fmt: skip
@click.option("--framework", type=click.Choice(list(FRAMEWORKS)), help="Check this framework only. [both]")
@click.option("--run-dir", default="runs", help="Run directory to check. [runs]")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON document instead of a table.")
@click.option("--timeout", type=click.FloatRange(1), default=60.0, metavar="SECONDS",
              help="Time limit for loading the frameworks on a host. [60]")  # fmt: skip
@_ssh_options
@_debug
@click.option("--agent", is_flag=True, hidden=True)
def doctor(debug: bool, **options: Any) -> None:
    """Check this host or all hosts of a job.

    It checks the local host, the hosts of --hostfile or --hosts over ssh, or, under a launcher, the hosts
    of the job.
    """
    from hvdtrain.tools.doctor.command import run_doctor

    sys.exit(run_doctor(options))


@click.command()
@click.option("--framework", type=click.Choice([*FRAMEWORKS, "both"]), default="both",
              help="Framework to drill. [both]")  # fmt: skip
@click.option("-H", "--hosts", metavar="HOSTS", help="Hosts and their slots, such as host1:2,host2:2.")
@click.option("--hostfile", type=ExpandedPath(), metavar="FILE", help="The same from a host file.")
@click.option("--workers", type=click.IntRange(2, 64), help="Number of workers. [all slots; 3 on this host]")
@click.option("--folder", default="drill", help="Folder for the runs, which all hosts share. [drill]")
@click.option("--keep", is_flag=True, help="Keep the runs, also if nothing was lost.")
@click.option("--json", "json_path", type=ExpandedPath(), metavar="FILE", help="Write a JSON document, too.")
@_ssh_options
@_debug
def drill(debug: bool, **options: Any) -> None:
    """Kill, freeze and stop workers of short jobs, and check that nothing is lost.

    An undisturbed run is followed by the same run disturbed in each way. The table shows how long training
    paused. The exit code is 4 if a step or a sample was lost or done twice.
    """
    from hvdtrain.tools.drill.command import run_drill

    sys.exit(run_drill(options))


@click.command()
@click.argument("page", required=False)
@_debug
def docs(page: str | None, debug: bool) -> None:
    """Show a page of the documentation; without PAGE, list the pages."""
    paths = sorted(Path(__file__).parents[1].glob("docs/*.md"))
    pages = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    if page is None:
        for name, text in pages.items():
            click.echo(f"{name:16}{text.splitlines()[0].lstrip('# ')}")
        return
    if (name := Path(page).stem) not in pages:
        rest = "`hvdtrain docs` lists the pages."
        raise UsageError(f"there is no page {page!r}", f"{did_you_mean(name, pages)} {rest}".lstrip())
    click.echo_via_pager(pages[name])


@click.command("build-horovod")
@click.option("--frameworks", type=click.Choice(["auto", "torch", "tf", "both"]), default="auto",
              help="Frameworks to build for; auto: those installed. [auto]")  # fmt: skip
@click.option("--mpi", type=click.Choice(["auto", "require", "none"]), default="auto",
              help="auto: with MPI if its compiler is found; none: with Gloo only. [auto]")  # fmt: skip
@click.option("--gpu", type=click.Choice(["none", "nccl"]), default="none",
              help="nccl: build for CUDA GPUs. [none]")  # fmt: skip
@click.option("--jobs", type=click.IntRange(0), default=0,
              help="Parallel compilations; 0: by cores and memory. [0]")  # fmt: skip
@click.option("--force", is_flag=True, help="Build even if it is installed or cached.")
@_debug
def build_horovod(debug: bool, **request: Any) -> None:
    """Build Horovod for the installed frameworks."""
    from hvdtrain.horovod_build import building, plan
    from hvdtrain.jobs.failures import interruptible

    with interruptible():
        click.echo(f"Horovod {building.build_horovod(plan.BuildRequest(**request), click.echo).describe()}")


def _judge(name: str, names: Iterable[str], text: str) -> click.Command:
    """Return a command that compares what a task computes; it has the options of these fields."""

    @click.command(name, cls=JobCommand, help=text)
    @click.argument("config_file", required=False, type=ExpandedPath())
    @click.option("--json", "path", type=ExpandedPath(), metavar="FILE", help="Write a JSON document, too.")
    @click.option("--limit", type=click.FloatRange(1), default=900.0, metavar="SECONDS",
                  help="When all of it is ended. [900]")  # fmt: skip
    @config_options(*names)
    def command(path: Any, limit: Any, config_file: Any, assignments: Any, debug: Any, **fields: Any) -> None:
        run = getattr(import_module(f"hvdtrain.tools.parity.{name}"), f"run_{name}")
        sys.exit(run(given_layers(assignments, fields, config_file), path, limit))

    return command


_PARITY = "Compare a task's PyTorch model with its TensorFlow model: what differs first, and why."
_PROVE = "Hold a task against a plain loop, by 1 and N workers, resumed, loaded: what differs, and why."
parity = _judge("parity", (name for name in OPTIONS if name != "framework"), _PARITY)
prove = _judge("prove", OPTIONS, _PROVE)
