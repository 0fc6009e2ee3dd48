"""What a sweep does: its file and its options, checked."""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hvdtrain.bench.options import check_writable
from hvdtrain.config import EITHER_OR, Config, Layer
from hvdtrain.config_layers import parse_assignments, read_file
from hvdtrain.early_stopping import MetricGoal
from hvdtrain.errors import ConfigError, UsageError
from hvdtrain.jobs.metric_checks import check_metric
from hvdtrain.jobs.setup import open_data, settle
from hvdtrain.search.options import PRUNERS, SAMPLERS, STORAGES, SweepOptions
from hvdtrain.search.side_by_side import check_cores, check_gpus, threads_of
from hvdtrain.search.space import (
    OF_THE_SWEEP,
    Dimension,
    config_values,
    first_point,
    grid_points,
    parse_space,
)
from hvdtrain.task import make_task

_TRIALS = 20
_DEFAULTS: Mapping[str, Any] = {
    "metric": "loss", "trials": None, "sampler": "tpe", "pruner": "none", "storage": "sqlite", "workers": 1,
    "parallel": 1,
}  # fmt: skip
_KEYS = (*_DEFAULTS, "space", "config")
_CHOICES: Mapping[str, Sequence[str]] = {"sampler": SAMPLERS, "pruner": PRUNERS, "storage": STORAGES}


@dataclass(frozen=True)
class SweepPlan:
    """What a sweep does.

    Attributes:
        folder: its folder, with a run directory for each trial.
        layers: the config values that all trials share, weakest source first.
        config: the same resolved, at a point of the space.
        space: what is searched.
        goal: the metric, and which end of it is better.
        trials: how many trials, those that fail included.
        sampler: "random", "tpe" or "grid".
        pruner: "none", "median", "asha" or "hyperband".
        storage: "sqlite" or "journal".
        workers: workers of each trial.
        parallel: trials at the same time.
        hosts: hosts and slots, as horovodrun takes them.
        controller: "mpi", "gloo" or None for what horovodrun chooses.
        threads: threads of each worker of trials side by side; None if the config says, or one runs at once.
        gpus: the GPUs that trials side by side share, as CUDA_VISIBLE_DEVICES has them; none if a trial
            sees all.
    """

    folder: Path
    layers: list[Layer]
    config: Config
    space: list[Dimension]
    goal: MetricGoal
    trials: int
    sampler: str
    pruner: str
    storage: str
    workers: int
    parallel: int
    hosts: str
    controller: str | None = None
    threads: int | None = None
    gpus: Sequence[str] = ()

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same when the sweep is continued, by name."""
        return {
            "metric": str(self.goal),
            "workers": self.workers,
            "space": [repr(one) for one in self.space],
            "config": {name: repr(value) for name, value in sorted(merged(self.layers).items())},
        }


def make_plan(path: Path | None, layers: list[Layer], options: SweepOptions) -> SweepPlan:
    """Return what a sweep does.

    Args:
        path: its file; None if options say all.
        layers: the job's config values from the command line, weakest source first.
        options: the options of the command.

    Raises:
        UsageError: If something in it is unknown or out of range, or contradicts something else.
    """
    if find_spec("optuna") is None:
        raise UsageError(
            "sweep needs optuna, which is not installed", "Run: python -m pip install 'hvdtrain[search]'"
        )
    check_writable(options.csv_path, options.json_path, read=[path] if path else [])
    given, source = _read(path)
    values = {**_DEFAULTS, **given, **options.given}
    shared = [*_layer_of_file(given, source), *layers]
    space = parse_space(_space_of(given, options), "--space" if options.space else f"{source}: space")
    goal = _checked(values, source)
    _check_searches(space, shared)
    task_class, config = settle([*shared, Layer("space", config_values(space, first_point(space)))])
    _check_goal(goal, config, task_class, pruner=values["pruner"])
    grid = len(grid_points(space)) if values["sampler"] == "grid" else _TRIALS
    workers, parallel = values["workers"], values["parallel"]
    return SweepPlan(
        folder=options.folder or _folder_of(path, config),
        layers=shared,
        config=config,
        space=space,
        goal=goal,
        trials=values["trials"] or grid,
        sampler=values["sampler"],
        pruner=values["pruner"],
        storage=values["storage"],
        workers=workers,
        parallel=parallel,
        hosts=check_cores(workers, parallel, options.hosts),
        controller=options.controller,
        threads=threads_of(workers, parallel) if config.threads is None else None,
        gpus=check_gpus(workers, parallel, config),
    )


def _read(path: Path | None) -> tuple[dict[str, Any], str]:
    """Return what a sweep's file holds, and what messages call it.

    Raises:
        ConfigError: If it has unknown keys.
    """
    if path is None:
        return {}, "the options"
    found = dict(read_file(path).values)
    for key in found:
        if key not in _KEYS:
            close = difflib.get_close_matches(str(key), _KEYS, n=1)
            hint = f"Did you mean {close[0]!r}? " if close else ""
            what = (
                "it belongs under config:"
                if key in Config.model_fields
                else f"{hint}Keys: {', '.join(_KEYS)}"
            )
            raise ConfigError(f"{path}: {key!r} is no key of a sweep's file", f"{what}.")
    return found, str(path)


def _layer_of_file(given: Mapping[str, Any], source: str) -> list[Layer]:
    values = given.get("config") or {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{source}: config: should be a mapping of config fields, found {values!r}")
    return [Layer(source, values, is_file=True)] if values else []


def _space_of(given: Mapping[str, Any], options: SweepOptions) -> Any:
    """Return the space: the file's, with fields of ``--space`` added or in place of the file's."""
    if not options.space:
        if not given.get("space"):
            raise UsageError(
                "nothing is searched: there is no space",
                "Give a file with space:, or --space 'learning_rate={low: 1e-4, high: 1e-1, log: true}'.",
            )
        return given["space"]
    own: dict[str, Any] = {}
    for text in options.space:
        name = text.partition("=")[0]
        # a name with dots is that of one field here, not of a mapping
        own[name] = next(iter(parse_assignments([f"value={text.partition('=')[2]}"]).values.values()), None)
    file = given.get("space") or {}
    return {**(file if isinstance(file, Mapping) else {}), **own}


def _checked(values: Mapping[str, Any], source: str) -> MetricGoal:
    """Return the metric, with the other values checked.

    Raises:
        ConfigError: If one is out of range.
    """
    for name, choices in _CHOICES.items():
        if values[name] not in choices:
            raise ConfigError(
                f"{source}: {name}: should be one of {', '.join(choices)}, found {values[name]!r}"
            )
    for name in ("trials", "workers", "parallel"):
        value = values[name]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{source}: {name}: should be a whole number, 1 or more, found {value!r}")
    try:
        return MetricGoal.parse(values["metric"])
    except ValueError as error:
        raise ConfigError(f"{source}: metric: {error}, found {values['metric']!r}") from None


def _check_searches(space: Sequence[Dimension], layers: Sequence[Layer]) -> None:
    """Check that nothing is given that would not count: what is searched, and what the sweep itself sets.

    Raises:
        ConfigError: If it is.
    """
    given = merged(layers)
    for name in OF_THE_SWEEP:
        if given.get(name) is not None:
            raise ConfigError(
                f"{name} {given[name]}: a sweep gives each trial its own run directory, and resumes it",
                "--folder names the sweep's folder; --init has all trials start from a run's weights.",
            )
    options = given.get("task_options") or {}
    for one in space:
        field, _, option = one.name.partition(".")
        if (option in options) if option else (given.get(field) is not None):
            raise ConfigError(
                f"space: {one.name} is searched, and the job's config sets it too", "Leave one of them out."
            )


def _check_goal(goal: MetricGoal, config: Config, task_class: Any, *, pruner: str) -> None:
    """Check that evaluations give the metric, with the task's own evaluation data.

    Raises:
        ConfigError: If they do not, or if a pruner has no evaluations to judge by.
    """
    task = make_task(task_class, config.task, config.task_options, config.framework)
    eval_data, _ = open_data(task, config, "eval_data")
    check_metric("metric", goal.metric, config, task, eval_data)
    if pruner != "none" and config.eval_every is None:
        raise ConfigError(
            f"pruner {pruner}: eval_every is null, so a trial is only evaluated when it is done",
            "Set eval_every, such as 1epoch or a number of steps, or leave the pruner out.",
        )


def _folder_of(path: Path | None, config: Config) -> Path:
    """Return the folder of a sweep that does not name one; the same for the same command."""
    name = path.stem if path else f"{Path(config.task.rpartition(':')[2]).stem.lower()}-{config.framework}"
    return Path("sweeps") / name


def merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the fields of layers together; a later one replaces the alternative of an earlier one."""
    values: dict[str, Any] = {}
    for layer in layers:
        for one, other in EITHER_OR:
            for given, displaced in ((one, other), (other, one)):
                if layer.values.get(given) is not None and layer.values.get(displaced) is None:
                    values.pop(displaced, None)
        for name, value in layer.values.items():
            values[name] = _joined(values.get(name), value)
    return values


def _joined(lower: Any, higher: Any) -> Any:
    """Return the second value; of two mappings, with the keys of both at any depth, as a config has them."""
    if not (isinstance(lower, Mapping) and isinstance(higher, Mapping)):
        return higher
    return {**lower, **{key: _joined(lower.get(key), value) for key, value in higher.items()}}
