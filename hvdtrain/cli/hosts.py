"""Commands for hosts, and for what is launched and installed on them."""

import os
import sys
from typing import Any

import click

from hvdtrain.config.options import ExpandedPath
from hvdtrain.errors import UsageError
from hvdtrain.host.frameworks import FRAMEWORKS


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
    from hvdtrain.tools.doctor.command import run_doctor

    sys.exit(run_doctor(options))


@click.command(context_settings={"allow_interspersed_args": False})
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


@click.command()
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
    from hvdtrain.tools.drill.command import run_drill

    sys.exit(run_drill(options))


@click.command("build-horovod")
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
