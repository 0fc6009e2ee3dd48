"""The command line. Options of a job are config fields, written with dashes."""

import sys

import click

from hvdtrain.cli import jobs, tools
from hvdtrain.cli.jobs import cli
from hvdtrain.errors import Interrupted, Removed, Stopped
from hvdtrain.host.launcher import is_elastic, output_rank
from hvdtrain.tools.output import installed

for _command in (*vars(jobs).values(), *vars(tools).values()):
    if isinstance(_command, click.Command) and _command is not cli:
        cli.add_command(installed(_command))


def main() -> None:
    """Run the command line and exit with a code that hvdtrain.errors lists."""
    try:
        cli(standalone_mode=False)
    except click.ClickException as error:  # which all workers have, and one of them reports
        is_shown = not output_rank()
        if is_elastic():
            from hvdtrain.elastic.member.membership import tell_driver

            is_shown = tell_driver(error) is error
        if is_shown:
            error.show()
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
    except (Interrupted, Stopped, Removed, Exception) as error:
        from hvdtrain.jobs.failures import end_worker, is_debugging

        end_worker(error, is_debugging())
