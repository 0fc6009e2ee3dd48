"""What a tuning has tried and what came out best: in words, as a config and as a document."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hvdtrain.bench.result import VERSION
from hvdtrain.bench.spread import Spread
from hvdtrain.bench.tune_mpi import ALL_REDUCE_VARIABLES, variables_of, without_mpi
from hvdtrain.config import EITHER_OR, Layer
from hvdtrain.errors import Interrupted
from hvdtrain.yaml_reader import write_yaml

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
        """Return it with another value: of the controller, of MPI, a variable in capitals, or a field."""
        if name == "controller":
            environ = without_mpi(self.environ) if value == "gloo" else self.environ
            return Setting(self.fields, environ, value)
        if chosen := variables_of(name, value):
            return Setting(self.fields, {**without_mpi(self.environ, name), **chosen}, self.controller)
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
        kept: whether it was faster beyond the spread, and trains the same.
        problem: why it was not measured.
        offered: whether it was faster beyond the spread, and changes the curve.
    """

    name: str
    value: Any
    ratio: Spread | None
    kept: bool
    problem: str = ""
    offered: bool = False

    def describe(self) -> str:
        """Return it as a line of the text that is shown."""
        found = self.problem if self.ratio is None else self.ratio.describe()
        end = "  kept" if self.kept else "  faster, not kept: it changes the curve" if self.offered else ""
        return f"{f'{self.name} {self.value}':<26}  {found}{end}"


@dataclass(frozen=True)
class Tuning:
    """What was tried, and what came out best.

    Attributes:
        layers: the job's config values, weakest source first.
        workers: number of workers.
        trials: what was tried, in order.
        best: the best setting.
        gain: its step relative to that of the job as it was; None if nothing was kept.
        warnings: what may have falsified a run, for each of which this is known.
        runs: how many runs there were.
        hosts: the user's hosts and slots; None for this host.
        interruption: the signal that ended it before all was tried; None if none did.
        problem: why all that was kept was not measured together, if it was not.
    """

    layers: list[Layer]
    workers: int
    trials: Sequence[Trial]
    best: Setting
    gain: Spread | None
    warnings: Sequence[str] = ()
    runs: int = 0
    hosts: str | None = None
    interruption: Interrupted | None = None
    problem: str = ""

    @property
    def is_faster(self) -> bool:
        """Whether all that was kept makes the job faster beyond the spread."""
        return self.gain is not None and self.gain.high < 1

    @property
    def is_written(self) -> bool:
        """Whether there is a config to write: also what was kept before a signal came."""
        is_partial = self.interruption is not None or bool(self.problem)
        return self.is_faster or (is_partial and any(one.kept for one in self.trials))

    def to_yaml(self) -> str:
        """Return the job's config with the fields that won."""
        return write_yaml({**merged(self.layers), **self.best.fields})

    def describe(self, path: Any) -> str:
        """Return it as the text that is shown.

        Args:
            path: the file that has the config.
        """
        lines = [f"tune: {len(self.trials)} settings, step relative to the best setting before"]
        lines += [f"  {one.describe()}" for one in self.trials]
        if self.warnings:
            count = f"{len(self.warnings)} of {self.runs} runs"
            lines.append(f"warning: {count}: {self.warnings[0]}")
        if any(one.offered for one in self.trials):
            lines.append(
                "note: what changes the curve is not in the file: try it by hand, and compare the curves"
            )
        if self.interruption is not None:
            lines.append(f"interrupted ({self.interruption}): nothing else was tried")
            if not self.is_written:
                return "\n".join([*lines, "nothing of these is kept: no file is written"])
            lines.append("what was kept did not run together beside the job as it was: check it with bench")
        elif self.problem:
            lines.append(f"warning: {self.problem}; check it with bench")
        elif self.gain is None:
            return "\n".join([*lines, "nothing changes more than the spread: the job stays as it is"])
        else:
            lines.append(f"all that was kept: {self.gain.describe()} of the step of the job as it was")
            if not self.is_faster:
                return "\n".join([*lines, "together it gains no more than the spread: no file is written"])
        if rounding := sorted(_ROUNDS & self.best.fields.keys()):
            lines.append(f"note: {', '.join(rounding)} rounds numbers: compare the curves before you keep it")
        if any(name.startswith(ALL_REDUCE_VARIABLES) for name in self.best.environ) and self.workers > 2:
            lines.append(
                "note: MPI then sums in another order: last bits differ, also if a run is resumed without it"
            )
        return "\n".join([*lines, f"written to {path}; start the job with:", f"  {self.command(path)}"])

    def command(self, path: Any) -> str:
        """Return the command that starts the job with the best setting."""
        variables = [f"{name}={value}" for name, value in self.best.environ.items()]
        launcher = []
        if self.workers > 1:
            controller = [f"--{self.best.controller}"] if self.best.controller else []
            hosts = ["-H", self.hosts] if self.hosts else []
            launcher = ["horovodrun", *controller, "-np", str(self.workers), *hosts]
        return " ".join([*variables, *launcher, "python -m hvdtrain", shlex.quote(str(path))])

    def to_document(self) -> dict[str, Any]:
        """Return the JSON document."""
        return {
            "version": VERSION,
            "workers": self.workers,
            "gain": None if self.gain is None else self.gain.to_dict(),
            "fields": dict(self.best.fields),
            "environment": dict(self.best.environ),
            "controller": self.best.controller,
            "is_faster": self.is_faster,
            "interrupted": self.interruption is not None,
            "warnings": list(self.warnings),
            "runs": self.runs,
            "trials": [
                {
                    "name": one.name,
                    "value": one.value,
                    "ratio": None if one.ratio is None else one.ratio.to_dict(),
                    "kept": one.kept,
                    "problem": one.problem,
                    "offered": one.offered,
                }
                for one in self.trials
            ],
        }


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
