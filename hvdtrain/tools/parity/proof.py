"""What `prove` compares: losses and arrays of runs, what of a difference is rounding, and its cause."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from hvdtrain.backends.records import PortableState
from hvdtrain.checkpoints.storage import name_of, verify
from hvdtrain.reporting.stored_runs import metrics_in, number, read_records
from hvdtrain.tools.parity.observation import Array, constant_factor, difference
from hvdtrain.tools.parity.plain import mean_of

_OF_MOVEMENT, _OF_VALUES, _OF_NUMBERS, _OF_NOISE = 1e-3, 3e-7, 1e-5, 30.0
_OF_LARGEST = 1e-6  # of the movements of all parameters
Metrics = Mapping[str, float]
_STATISTICS = ("/moving_mean", "/moving_variance")


@dataclass(frozen=True)
class Run:
    """A training: its loss in each step, the model after each, and its evaluation at the end."""

    losses: Mapping[int, float]
    arrays: Callable[[int], PortableState]  # after a step
    evaluation: Metrics


def run_in(folder: Path) -> Run:
    """Return the run in a run directory, which has a checkpoint of each step."""
    records = list(read_records(folder))
    evaluated = [metrics_in(record) for record in records if record["phase"] == "eval"]
    read = {name: number(value) for name, value in (evaluated[-1] if evaluated else {}).items()}
    last = {name: value for name, value in read.items() if value is not None}
    losses = {
        record["step"]: loss
        for record in records
        if record["phase"] == "train" and (loss := number(record["loss"])) is not None
    }

    def arrays(step: int) -> PortableState:
        found = verify(folder / "checkpoints" / name_of(step)).read_model()
        return {name: np.array(found[name]) for name in found if name.startswith(("model/", "loss/"))}

    return Run(losses, arrays, last)


@dataclass(frozen=True)
class Rounding:
    """What rounding does: two plain loops whose initial values differ in the last bits."""

    start: PortableState
    trained: Sequence[str]
    losses: Mapping[int, float] = field(default_factory=dict)  # how far the losses of a step are apart
    arrays: Mapping[tuple[int, str], float] = field(default_factory=dict)  # of arrays: root mean squares
    evaluation: float = 0.0
    # what counts as rounding at least: of movements, of values, of losses
    limits: tuple[float, float, float] = (_OF_MOVEMENT, _OF_VALUES, _OF_NUMBERS)

    def loss(self, step: int, value: float) -> float:
        """Return how far losses of a step may be apart."""
        return max(_OF_NOISE * self.losses.get(step, 0.0), self.limits[2] * max(abs(value), 1e-3))

    def array(self, step: int, name: str, value: Array) -> float:
        """Return how far an array may be apart after a step: a root mean square."""
        old = self.start.get(name)
        moved = size(value - old) if old is not None and old.shape == value.shape else 0.0
        noise = _OF_NOISE * self.arrays.get((step, name), 0.0)
        return max(noise, self.limits[1] * size(value), self.limits[0] * moved)


def size(array: Array) -> float:
    """Return the root of the mean square; 0 of an empty array."""
    return float(np.sqrt(np.square(abs(array), dtype=np.float64).mean())) if array.size else 0.0


def rounding_of(one: Run, other: Run, starts: Sequence[PortableState], trained: Sequence[str]) -> Rounding:
    """Return what rounding does, from two loops."""
    arrays = {}
    for step in one.losses:
        left, right = one.arrays(step), other.arrays(step)
        for name in [name for name in left if left[name].dtype.kind == "f"]:
            moves = [
                of[name].astype(float) - was[name] for of, was in zip((left, right), starts, strict=True)
            ]
            arrays[step, name] = size(moves[0] - moves[1])
    losses = {step: abs(one.losses[step] - other.losses[step]) for step in one.losses}
    apart = abs(one.evaluation.get("loss", 0.0) - other.evaluation.get("loss", 0.0))
    return Rounding(starts[0], trained, losses, arrays, apart)


@dataclass(frozen=True)
class Comparison:
    """How far two runs are apart, and where they begin to differ beyond rounding."""

    loss: float = 0.0  # the largest relative difference of losses
    parameters: float = 0.0  # of arrays that training updates, relative to how far it moved them
    buffers: float = 0.0  # of others, relative to their values
    step: int = 0  # the first step that differs; 0 if none does
    name: str = ""  # the first array that differs there; empty if it is the loss
    text: str = ""  # how


def compare(ref: Run, other: Run, rounding: Rounding, first: int = 1, left_out: str = "/") -> Comparison:
    """Compare two runs from step ``first`` on: a loss, then the parameters after the step, then other arrays.

    Arrays whose names end with ``left_out`` are not compared.
    """
    apart: dict[str, Any] = {"loss": 0.0, "parameters": 0.0, "buffers": 0.0}
    found = Comparison()
    for step in sorted(one for one in ref.losses if one >= first):
        one, two = ref.losses[step], other.losses.get(step, math.nan)
        relative = abs(one - two) / max(abs(one), 1e-12)
        apart["loss"] = max(apart["loss"], relative if math.isfinite(relative) else math.inf)
        if not found.step and not abs(one - two) <= rounding.loss(step, one):
            found = Comparison(step=step, text=f"it is {two:.7g} in place of {one:.7g}")
        left, right = ref.arrays(step), other.arrays(step)
        trained = [name for name in rounding.trained if name in left]
        moves = {name: _moved(left[name], rounding.start.get(name)) for name in left}
        least = _OF_LARGEST * max((moves[name] for name in trained), default=0.0)
        for name in dict.fromkeys([*trained, *left]):
            a, b, is_trained = left[name], right.get(name), name in trained
            if name.endswith(left_out):
                continue
            if b is None or b.shape != a.shape:
                found = found if found.step else Comparison(step=step, name=name, text="it has another shape")
                continue
            of = max(moves[name] if is_trained else size(a), 1e-3 * size(a), 1e-12)
            distance, kind = _moved(b, a), "parameters" if is_trained else "buffers"
            apart[kind] = max(apart[kind], distance / of)
            most = max(rounding.array(step, name, a), least) if a.dtype.kind in "fc" else 0.0
            if not found.step and not distance <= most:
                old, factor = rounding.start.get(name), None
                if old is not None and old.shape == a.shape and a.dtype.kind == "f":
                    factor = constant_factor(b - old, a - old)
                text = f"it differs by {distance / of:.1e} of its {'movement' if is_trained else 'values'}"
                text = text if factor is None else f"it moved {factor:.4g} times as far"
                found = Comparison(step=step, name=name, text=text)
    return replace(found, **apart)


def _moved(array: Array, old: Array | None) -> float:
    """Return how far an array is from another one: a root mean square."""
    if old is None or old.shape != array.shape:
        return size(array)
    wide = complex if array.dtype.kind == "c" else float
    return size(abs(array.astype(wide) - old.astype(wide)))


@dataclass(frozen=True)
class Traits:
    """What a task's model, loss and data do that the number of workers can change."""

    generators: Sequence[str] = ()  # whose numbers change the loss in training
    in_evaluation: Sequence[str] = ()  # whose numbers change the loss in evaluation
    depends: str = ""  # how the loss of a sample depends on others of its batch; empty if it does not
    in_training: bool = False  # whether it does so in training alone
    drawn: str = ""  # an array of the data that reading again changes
    changed: Sequence[str] = ()  # arrays that steps change and no optimizer does
    has_own_step: bool = False
    has_callbacks: bool = False
    is_hidden: bool = False  # whether calls change what no checkpoint has

    @property
    def buffers(self) -> list[str]:
        """Arrays that steps change, but for the statistics of batch norm."""
        return [name for name in self.changed if not name.endswith(_STATISTICS)]


def cause_of(found: Comparison, traits: Traits, *, is_plain: bool, framework: str) -> str:
    """Return why runs differ, if one of the known kinds explains it; empty if none does."""
    drawn = dict.fromkeys((*traits.generators, *traits.in_evaluation))
    own = [name for name in drawn if name != framework]
    several, random = not is_plain, f"random numbers of {' and '.join(own)} in the model or the loss"
    buffers = ", ".join(name.removeprefix("model/") for name in traits.buffers[:3])
    rules = {
        f"the data draw random numbers: reading a batch again gives another {traits.drawn!r}; derive them "
        "from the index of a sample": traits.drawn,
        "the model keeps what no checkpoint has, such as a buffer with persistent=False or an attribute that "
        "its calls change": traits.is_hidden,
        f"buffer {found.name.removeprefix('model/')!r} is each worker's own: a step changes it by the "
        "samples of its worker; state_reductions says how it is combined": several
        and found.name in traits.buffers,
        f"{random}: each worker draws others": several and own,
        f"state that each worker changes by its own samples, and that the model computes with: {buffers}": (
            several and traits.buffers and (traits.in_training or not traits.depends)
        ),
        f"{traits.depends}; hvdtrain.all_gather gives the samples of all workers": several and traits.depends,
        "the task's own step: what it computes is no mean over its samples, such as a sum, or a gradient "
        "that it scales by the size of its batch": several and traits.has_own_step,
        "the task's callbacks, which a plain loop does not call": is_plain and traits.has_callbacks,
        random: is_plain and own,
        "batch norm: its statistics are not those of the global batch": found.name.endswith(_STATISTICS),
    }
    return next((text for text, applies in rules.items() if applies), "")


def compare_evaluations(ref: Metrics, other: Metrics, noise: float = 0.0) -> dict[str, tuple[float, float]]:
    """Return the metrics of two evaluations that differ beyond rounding."""
    pairs = {name: (ref[name], other[name]) for name in ref if name in other}
    return {
        name: (a, b)
        for name, (a, b) in pairs.items()
        if not abs(a - b) <= max(_OF_NOISE * noise, 2 * _OF_NUMBERS * max(abs(a), 1e-2))
        and not (math.isnan(a) and math.isnan(b))
    }


def equal_arrays(left: PortableState, right: PortableState) -> str:
    """Return the first array that is not bit by bit the same in both; empty if there is none."""
    for name, array in left.items():
        equal_nan = array.dtype.kind in "fc"
        if name not in right or not np.array_equal(array, right[name], equal_nan=equal_nan):
            return name
    return ""


def splits(whole: tuple[Any, Any], *parts: tuple[Any, Any]) -> str:
    """Return how losses of a whole batch differ from those of its halves; empty if they do not."""
    if whole[0].shape and all(one[0].shape for one in parts):
        apart = difference(np.concatenate([one[0] for one in parts]), whole[0])
        if apart.relative > 1e-4:
            return f"the loss of a sample depends on others of its batch (by {apart.relative:.1e})"
        return ""
    value, ((left, weight), (right, other)) = mean_of(whole)[0], map(mean_of, parts)
    share = 0.5 if math.isnan(weight) else weight / (weight + other or 1.0)
    if abs(share * left + (1 - share) * right - value) <= 1e-4 * max(abs(value), 1e-6):
        return ""
    if abs(left + right - value) <= 1e-4 * max(abs(value), 1e-6):
        return "the loss is a sum over the samples, and no mean: its size depends on the batch"
    return "the loss of a batch is no mean of its samples' losses: a sample's depends on others"
