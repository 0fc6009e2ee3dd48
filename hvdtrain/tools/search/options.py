"""The options of ``lr-find`` and ``batch-find``, in addition to those of a job."""

from dataclasses import dataclass
from pathlib import Path

import click

from hvdtrain.config.options import ExpandedPath
from hvdtrain.tools.output import all_of, parse_size

LOWEST_RATE, HIGHEST_RATE, RISING_STEPS = 1e-6, 10.0, 200


@dataclass(frozen=True)
class RateOptions:
    """The options of ``lr-find``, as ``rate_options`` describes them."""

    lowest_rate: float = LOWEST_RATE
    highest_rate: float = HIGHEST_RATE
    rising_steps: int = RISING_STEPS
    json_path: Path | None = None
    picture: Path | None = None


@dataclass(frozen=True)
class BatchOptions:
    """The options of ``batch-find``, as ``batch_options`` describes them."""

    num_proc: int = 1
    seconds: float = 5.0
    memory: int | None = None
    hosts: str | None = None
    controller: str | None = None
    json_path: Path | None = None


_JSON = click.option("--json", "json_path", type=ExpandedPath(), metavar="FILE",
                     help="Write a JSON document, too.")  # fmt: skip
rate_options = all_of(
    click.option("--lowest-rate", type=float, default=LOWEST_RATE, metavar="RATE",
                 help=f"Learning rate of the first step, as the optimizer has it. [{LOWEST_RATE:g}]"),
    click.option("--highest-rate", type=float, default=HIGHEST_RATE, metavar="RATE",
                 help=f"Learning rate of the last step. [{HIGHEST_RATE:g}]"),
    click.option("--rising-steps", type=int, default=RISING_STEPS, metavar="N",
                 help=f"Number of steps, unless the loss diverges before. [{RISING_STEPS}]"),
    _JSON,
    click.option("--picture", type=ExpandedPath(), metavar="FILE",
                 help="Draw the curve, too: .png, .svg or .html; needs matplotlib."),
)  # fmt: skip
batch_options = all_of(
    click.option("-np", "--num-proc", type=click.IntRange(1), default=1, metavar="N",
                 help="Workers of each job. [1]"),
    click.option("--seconds", type=click.FloatRange(0.1, 3600), default=5.0, metavar="SECONDS",
                 help="How long each micro-batch trains, roughly. [5]"),
    click.option("--memory", type=lambda text: parse_size(text, 2**50, "1024T"), metavar="SIZE",
                 help="Memory that the workers of a host may take. [nine tenths of what is free]"),
    click.option("-H", "--hosts", metavar="HOSTS",
                 help="Hosts and slots, such as host1:2,host2:2. [this host's cores]"),
    click.option("--controller", type=click.Choice(["mpi", "gloo"]),
                 help="Controller of the jobs. [horovodrun's choice]"),
    _JSON,
)  # fmt: skip
