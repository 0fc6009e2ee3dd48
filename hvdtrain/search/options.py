"""The options of the commands that search, beside those of a job."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from hvdtrain.bench.options import Bytes
from hvdtrain.cli_options import ExpandedPath

SAMPLERS, PRUNERS = ("random", "tpe", "grid"), ("none", "median", "asha", "hyperband")
STORAGES = ("sqlite", "journal")
LOWEST_RATE, HIGHEST_RATE, RISING_STEPS = 1e-6, 10.0, 200


@dataclass(frozen=True)
class RateOptions:
    """What the options of ``lr-find`` say, beside those of the job.

    Attributes:
        lowest_rate: learning rate of the first step.
        highest_rate: learning rate of the last step.
        rising_steps: number of steps.
        json_path: file for the JSON document.
        picture: file for the picture.
    """

    lowest_rate: float = LOWEST_RATE
    highest_rate: float = HIGHEST_RATE
    rising_steps: int = RISING_STEPS
    json_path: Path | None = None
    picture: Path | None = None


@dataclass(frozen=True)
class BatchOptions:
    """What the options of ``batch-find`` say, beside those of the job.

    Attributes:
        num_proc: number of workers.
        seconds: how long each micro-batch trains, roughly.
        memory: how much memory the workers of a host may take; None for what is free.
        hosts: hosts and slots; None for this host.
        controller: "mpi", "gloo" or None for what horovodrun chooses.
        json_path: file for the JSON document.
    """

    num_proc: int = 1
    seconds: float = 5.0
    memory: int | None = None
    hosts: str | None = None
    controller: str | None = None
    json_path: Path | None = None


@dataclass(frozen=True)
class SweepOptions:
    """What the options of ``sweep`` say, beside those of the job.

    Attributes:
        space: fields of the space, each as NAME=RANGE.
        folder: the sweep's folder; None for one that follows from its file or task.
        metric: the metric; None for the file's, or the loss.
        trials: how many trials; None for the file's, or 20.
        sampler: "random", "tpe" or "grid"; None for the file's, or tpe.
        pruner: "none", "median", "asha" or "hyperband"; None for the file's, or none.
        storage: "sqlite" or "journal"; None for the file's, or sqlite.
        num_proc: workers of each trial; None for the file's, or 1.
        parallel: trials side by side; None for the file's, or 1.
        hosts: hosts and slots; None for this host.
        controller: "mpi", "gloo" or None for what horovodrun chooses.
        csv_path: file for the trials as CSV.
        json_path: file for the JSON document.
    """

    space: tuple[str, ...] = ()
    folder: Path | None = None
    metric: str | None = None
    trials: int | None = None
    sampler: str | None = None
    pruner: str | None = None
    storage: str | None = None
    num_proc: int | None = None
    parallel: int | None = None
    hosts: str | None = None
    controller: str | None = None
    csv_path: Path | None = None
    json_path: Path | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What was given of what a sweep's file may say, too."""
        names = ("metric", "trials", "sampler", "pruner", "storage", "parallel")
        values = {**{name: getattr(self, name) for name in names}, "workers": self.num_proc}
        return {name: value for name, value in values.items() if value is not None}


def options_of(*options: Any) -> Callable[[Any], Any]:
    """Return a decorator that adds options to a command, in this order."""

    def decorate(command: Any) -> Any:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


_JSON = click.option("--json", "json_path", type=ExpandedPath(), metavar="FILE",
                     help="Write a JSON document, too.")  # fmt: skip

rate_options = options_of(
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

_NUM_PROC = click.option("-np", "--num-proc", type=click.IntRange(1), default=1, metavar="N",
                         help="Workers of each job. [1]")  # fmt: skip
_HOSTS = click.option("-H", "--hosts", metavar="HOSTS",
                      help="Hosts and slots, such as host1:2,host2:2. [this host's cores]")  # fmt: skip
_CONTROLLER = click.option("--controller", type=click.Choice(["mpi", "gloo"]),
                           help="Controller of the jobs. [horovodrun's choice]")  # fmt: skip

batch_options = options_of(
    _NUM_PROC,
    click.option("--seconds", type=click.FloatRange(0.1, 3600), default=5.0, metavar="SECONDS",
                 help="How long each micro-batch trains, roughly. [5]"),
    click.option("--memory", type=Bytes(2**50, "1024T"), metavar="SIZE",
                 help="Memory that the workers of a host may take. [nine tenths of what is free]"),
    _HOSTS,
    _CONTROLLER,
    _JSON,
)  # fmt: skip

sweep_options = options_of(
    click.option("--space", multiple=True, metavar="FIELD=VALUES",
                 help="Search a config field: {low: 1e-4, high: 1e-1, log: true}, or [32, 64]. Repeatable."),
    click.option("--folder", type=ExpandedPath(), metavar="DIR",
                 help="Folder of the sweep. [sweeps/NAME of the file, or sweeps/TASK-FRAMEWORK]"),
    click.option("--metric", metavar="NAME",
                 help="Evaluation metric; NAME:min or NAME:max if the name does not tell. [loss]"),
    click.option("--trials", type=click.IntRange(1), metavar="N",
                 help="Number of trials, those that fail included. [20; all points of a grid]"),
    click.option("--sampler", type=click.Choice(SAMPLERS), help="How points are chosen. [tpe]"),
    click.option("--pruner", type=click.Choice(PRUNERS),
                 help="What ends trials that are worse than others, after evaluations. [none]"),
    click.option("--storage", type=click.Choice(STORAGES), help="File of the study. [sqlite]"),
    click.option("-np", "--num-proc", type=click.IntRange(1), metavar="N", help="Workers of each trial. [1]"),
    click.option("--parallel", type=click.IntRange(1), metavar="N",
                 help="Trials side by side, as far as there are cores. [1]"),
    _HOSTS,
    _CONTROLLER,
    click.option("--csv", "csv_path", type=ExpandedPath(), metavar="FILE",
                 help="Write the trials as CSV, too."),
    _JSON,
)  # fmt: skip
