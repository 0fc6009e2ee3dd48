"""Commands that measure a job: its speed, and whether both frameworks compute the same."""

import sys
from pathlib import Path
from typing import Any

import click

from hvdtrain.cli.fields import OPTIONS, config_options, given_layers
from hvdtrain.config.options import ExpandedPath, JobCommand
from hvdtrain.tools.bench.options import BenchOptions, bench_options, take_options
from hvdtrain.tools.bench.plan_options import PlanOptions, plan_options


@click.command(cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@bench_options
@config_options(*OPTIONS)
def bench(config_file: Path | None, assignments: tuple[str, ...], debug: bool, **options: Any) -> None:
    """Measure how fast a job trains, and what its steps wait for.

    \b
    horovodrun -np 2 python -m hvdtrain bench [CONFIG.yaml] --framework torch|tf [OPTIONS]
    python -m hvdtrain bench --sweep 1,2,4 --framework torch [OPTIONS]

    It takes the options of train and leaves no run directory behind.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap
    from hvdtrain.tools.bench.command import run_bench

    chosen, fields = take_options(options, BenchOptions)
    run_bench(given_layers(assignments, fields, config_file), chosen)


@click.command(cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@plan_options
@config_options(*OPTIONS)
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
    from hvdtrain.tools.bench.plan_command import run_plan

    chosen, fields = take_options(options, PlanOptions)
    run_plan(given_layers(assignments, fields, config_file), chosen)


@click.command(cls=JobCommand)
@click.argument("config_file", required=False, type=ExpandedPath())
@click.option("--json", "json_path", type=ExpandedPath(), metavar="FILE", help="Write a JSON document, too.")
@config_options(*(name for name in OPTIONS if name != "framework"))
def parity(
    config_file: Path | None,
    json_path: Path | None,
    assignments: tuple[str, ...],
    debug: bool,
    **options: Any,
) -> None:
    """Compare a task's PyTorch model with its TensorFlow model, layer by layer and in training.

    \b
    horovodrun --mpi -np 2 python -m hvdtrain parity --task file.py:Task [--init CHECKPOINT] [OPTIONS]

    Half of the processes of one MPI job run PyTorch, the other half TensorFlow, with the same weights and the
    same batches, for 100 steps unless --steps says otherwise. It names the first layer that differs and the
    cause, and tells rounding from differences by repeating all in fp64. The exit code is 4 without parity.
    """  # noqa: D301 - click reads a backspace as the start of lines that it must not wrap
    from hvdtrain.tools.parity.command import run_parity

    layers = given_layers(assignments, options, config_file)
    sys.exit(run_parity(layers, json_path))
