"""Commands that read run directories: they compare, draw, follow and send runs."""

from pathlib import Path

import click

from hvdtrain.config.options import ExpandedPath, PathOrUrl
from hvdtrain.printable import printable


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=PathOrUrl())
@click.option("--sort", metavar="COLUMN",
              help="Column to sort by, best first: accuracy, 'best loss', seconds.")  # fmt: skip
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values, with all digits.")
def compare(run_dirs: tuple[Path | str, ...], sort: str | None, as_csv: bool) -> None:
    """Compare runs: results in a table, and what differs in their configs.

    A folder that holds run directories, such as runs, stands for all of them; it can be a URL.
    """
    from hvdtrain.checkpoints.remote.fetched_runs import local_runs
    from hvdtrain.reporting.compare import print_csv, print_table

    (print_csv if as_csv else print_table)(local_runs(run_dirs), sort)


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=PathOrUrl())
@click.option("-o", "--output", type=ExpandedPath(), default="report.html", metavar="FILE",
              help="File to write. [report.html]")  # fmt: skip
@click.option("--verify/--no-verify", default=True, help="Check every byte of the checkpoints. [on]")
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
def report(run_dirs: tuple[Path | str, ...], output: Path, verify: bool, debug: bool) -> None:
    """Draw runs: curves, events, configs and checkpoints in one HTML page.

    The page needs no network. Runs may still be going on. A folder that holds run directories, such as runs,
    stands for all of them; it can be a URL.
    """
    from hvdtrain.checkpoints.remote.fetched_runs import local_runs
    from hvdtrain.run_views.command import write_report

    click.echo(printable(write_report(local_runs(run_dirs, for_report=True), output, verify)))


@click.command()
@click.argument("run_dir", type=PathOrUrl())
@click.option("--wait", type=click.FloatRange(0), metavar="SECONDS",
              help="How long to wait for a run that is not there yet, or for a stopped or killed one to be "
                   "resumed. [60, and 0 at the start]")  # fmt: skip
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
def watch(run_dir: Path | str, wait: float | None, debug: bool) -> None:
    """Follow a run from another terminal, or another host that sees its directory or URL.

    It ends when the run ends.
    """
    from hvdtrain.tools.report.follow import follow

    follow(run_dir, wait)


@click.command()
@click.argument("run_dirs", nargs=-1, required=True, type=ExpandedPath())
@click.option("--to", "names", multiple=True, metavar="NAME",
              help="Tracker: mlflow or wandb. [those of the run's config]")  # fmt: skip
@click.option("--checkpoints", is_flag=True, help="Send the newest checkpoint, too.")
@click.option("--debug", is_flag=True, help="Show the traceback of errors.")
def track(run_dirs: tuple[Path, ...], names: tuple[str, ...], checkpoints: bool, debug: bool) -> None:
    """Send runs to trackers: what a job could not send, or runs that were never tracked."""
    from hvdtrain.jobs.track import track_runs

    track_runs(run_dirs, names, checkpoints, lambda text: click.echo(printable(text)))
