"""Trying settings of a job by short runs, and keeping those that make it faster."""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.bench.result import VERSION
from hvdtrain.bench.spread import Spread
from hvdtrain.config import EITHER_OR, Layer
from hvdtrain.errors import EnvironmentFault
from hvdtrain.yaml_reader import write_yaml

REPEAT = 3  # pairs of runs for each setting
_LEAST_GAIN = 0.02  # of the step
_NEAR_LOSS = 0.05  # relative: a setting may round numbers, and not change what is trained
_ROUNDS = {"compression", "precision"}


@dataclass(frozen=True)
class Setting:
    """How a job is run.

    Attributes:
        fields: config fields that differ from the user's.
        environ: environment variables.
        controller: "mpi", "gloo" or None for horovodrun's choice.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    environ: Mapping[str, str] = field(default_factory=dict)
    controller: str | None = None

    def changed(self, name: str, value: Any) -> "Setting":
        """Return it with another value: of the controller, of a variable in capitals, or of a field."""
        if name == "controller":
            return Setting(self.fields, self.environ, value)
        if name.isupper():
            return Setting(self.fields, {**self.environ, name: str(value)}, self.controller)
        return Setting({**self.fields, name: value}, self.environ, self.controller)


@dataclass(frozen=True)
class Trial:
    """A setting that was tried.

    Attributes:
        name: what was changed.
        value: to what.
        ratio: the step relative to that of the best setting before; None if the job failed.
        kept: whether it was faster beyond the spread.
        problem: why it was not measured.
    """

    name: str
    value: Any
    ratio: Spread | None
    kept: bool
    problem: str = ""


@dataclass(frozen=True)
class Tuning:
    """What was tried, and what came out best.

    Attributes:
        layers: the job's config values, weakest source first.
        workers: number of workers.
        trials: what was tried, in order.
        best: the best setting.
        gain: its step relative to that of the job as it was; None if nothing was kept.
    """

    layers: list[Layer]
    workers: int
    trials: Sequence[Trial]
    best: Setting
    gain: Spread | None

    def to_yaml(self) -> str:
        """Return the job's config with the fields that won."""
        return write_yaml({**merged(self.layers), **self.best.fields})

    def describe(self, path: Any) -> str:
        """Return it as the text that is shown.

        Args:
            path: the file that has the config.
        """
        lines = [f"tune: {len(self.trials)} settings, step relative to the best setting before"]
        for one in self.trials:
            found = one.problem if one.ratio is None else one.ratio.describe()
            lines.append(f"  {f'{one.name} {one.value}':<26}  {found}{'  kept' if one.kept else ''}")
        if self.gain is None:
            return "\n".join([*lines, "nothing changes more than the spread: the job stays as it is"])
        lines.append(f"all that was kept: {self.gain.describe()} of the step of the job as it was")
        if self.gain.high >= 1:
            lines.append("warning: together they do not gain more than the spread")
        if rounding := sorted(_ROUNDS & self.best.fields.keys()):
            lines.append(f"note: {', '.join(rounding)} rounds numbers: compare the curves before you keep it")
        return "\n".join([*lines, f"written to {path}; start the job with:", f"  {self.command(path)}"])

    def command(self, path: Any) -> str:
        """Return the command that starts the job with the best setting."""
        variables = [f"{name}={value}" for name, value in self.best.environ.items()]
        launcher = []
        if self.workers > 1:
            controller = [f"--{self.best.controller}"] if self.best.controller else []
            launcher = ["horovodrun", *controller, "-np", str(self.workers)]
        return " ".join([*variables, *launcher, "python -m hvdtrain", str(path)])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "version": VERSION,
            "workers": self.workers,
            "gain": None if self.gain is None else self.gain.to_dict(),
            "fields": dict(self.best.fields),
            "environment": dict(self.best.environ),
            "controller": self.best.controller,
            "trials": [
                {
                    "name": one.name,
                    "value": one.value,
                    "ratio": None if one.ratio is None else one.ratio.to_dict(),
                    "kept": one.kept,
                    "problem": one.problem,
                }
                for one in self.trials
            ],
        }


def settings_to_try(workers: int, has_mpi: bool, given: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return names and values of what is tried, in order.

    What the user has set to that value already is left out, and what means nothing for one worker.

    Args:
        workers: number of workers.
        has_mpi: whether Horovod was built with MPI.
        given: the fields that the user set.
    """
    cores = len(os.sched_getaffinity(0))
    found: list[tuple[str, Any]] = []
    if workers > 1:
        found += [("controller", name) for name in (("gloo", "mpi") if has_mpi else ())]
        found += [("HOROVOD_CYCLE_TIME", value) for value in (0.2, 5)]
    found += [("threads", count) for count in sorted({1, max(1, cores // workers), cores})]
    if workers > 1:
        found.append(("compression", "fp16"))
    found += [("precision", "bf16"), ("compile", True)]
    return [(name, value) for name, value in found if given.get(name) != value]


def tune(
    layers: list[Layer],
    tries: Sequence[tuple[str, Any]],
    measure: Callable[[Setting], dict[str, Any]],
    *,
    workers: int,
    start: Setting,
    repeat: int = REPEAT,
    say: Callable[[str], None] = lambda _: None,
) -> Tuning:
    """Try settings one after the other, each beside the best one before it, and keep those that gain.

    Args:
        layers: the job's config values, weakest source first.
        tries: names and values to try.
        measure: runs the job with a setting, and returns the document of what it found.
        workers: number of workers.
        start: how the job is run now.
        repeat: how many pairs of runs there are for each setting.
        say: is called with what is going on.

    Raises:
        EnvironmentFault: If the job fails as it is.
    """
    best, trials = start, list[Trial]()
    first_loss = float(measure(best)["first_loss"])  # also fails early if the job does not run
    for name, value in tries:
        say(f"{name} {value} ...")
        trial = _try(name, value, _Beside(measure, best, first_loss, repeat))
        trials.append(trial)
        if trial.kept:
            best = best.changed(name, value)
    if best == start:
        return Tuning(layers, workers, trials, best, None)
    say("all that was kept ...")
    return Tuning(layers, workers, trials, best, _Beside(measure, start, first_loss, repeat).ratio_of(best))


@dataclass(frozen=True)
class _Beside:
    """Measures settings beside another one.

    Attributes:
        measure: runs the job with a setting.
        other: the other setting.
        first_loss: the loss that the job begins with.
        repeat: how many pairs of runs there are.
    """

    measure: Callable[[Setting], dict[str, Any]]
    other: Setting
    first_loss: float
    repeat: int

    def ratio_of(self, setting: Setting) -> Spread:
        """Return the step with a setting relative to the other's, of each pair of runs.

        Raises:
            EnvironmentFault: If the job fails with it, or begins with another loss.
        """
        own, others = [], []
        for _ in range(self.repeat):
            found = self.measure(setting)
            if not math.isclose(found["first_loss"], self.first_loss, rel_tol=_NEAR_LOSS):
                raise EnvironmentFault(
                    f"the first loss is {found['first_loss']:.4g} in place of {self.first_loss:.4g}"
                )
            own.append(found["chunk_seconds"]["median"])
            others.append(self.measure(self.other)["chunk_seconds"]["median"])
        return Spread.of_ratios(own, others)


def _try(name: str, value: Any, beside: _Beside) -> Trial:
    try:
        ratio = beside.ratio_of(beside.other.changed(name, value))
    except EnvironmentFault as error:
        reason = next((line for line in reversed(error.remedy.splitlines()) if line.strip()), "")
        return Trial(name, value, None, False, f"not measured: {error.problem}. {reason.strip()}".strip())
    kept = ratio.high < 1 and ratio.median <= 1 - _LEAST_GAIN and beside.repeat > 1
    return Trial(name, value, ratio, kept)


def merged(layers: Sequence[Layer]) -> dict[str, Any]:
    """Return the fields of layers together; a later one replaces the alternative of an earlier one."""
    values: dict[str, Any] = {}
    for layer in layers:
        for one, other in EITHER_OR:
            for given, displaced in ((one, other), (other, one)):
                if layer.values.get(given) is not None and layer.values.get(displaced) is None:
                    values.pop(displaced, None)
        for name, value in layer.values.items():
            before = values.get(name)
            both = isinstance(before, Mapping) and isinstance(value, Mapping)
            values[name] = {**before, **value} if both and before is not None else value
    return values
