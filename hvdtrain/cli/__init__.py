"""The command line. Options of a job are config fields, written with dashes."""

import sys

import click

from hvdtrain.cli.group import cli
from hvdtrain.cli.hosts import build_horovod, doctor, drill, elastic
from hvdtrain.cli.jobs import evaluate, export, import_, predict, train
from hvdtrain.cli.runs import compare, report, track, watch
from hvdtrain.cli.searching import batch_find, lr_find
from hvdtrain.cli.tools import bench, parity, plan
from hvdtrain.errors import Interrupted, Removed, Stopped

_COMMANDS = (
    train, bench, plan, lr_find, batch_find, parity, evaluate, export, predict, import_,
    compare, report, watch, track, doctor, elastic, drill, build_horovod,
)  # fmt: skip
for _command in _COMMANDS:
    cli.add_command(_command)


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
