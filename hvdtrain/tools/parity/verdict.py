"""What differs of PyTorch's model and TensorFlow's, and why: the first layer, and the first step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hvdtrain.backends.portable.names import check_state
from hvdtrain.backends.records import PortableState
from hvdtrain.errors import TaskError
from hvdtrain.storage.text import counted
from hvdtrain.tools.parity.findings import (
    MISSING_BIAS,
    MOMENTUM,
    Finding,
    constant_factor,
    different_beginnings,
    different_settings,
    explain,
    place_of,
)
from hvdtrain.tools.parity.observation import Observation, difference
from hvdtrain.tools.parity.proof import Comparison, Rounding, Run, compare
from hvdtrain.tools.parity.rows import Row, first_divergence, make_rows

_PLACES = {True: (1e-6, 1e-3, 1e-6), False: (1e-4, 1e-2, 1e-3)}  # of layers, movements, losses; in fp64, not
_VARIANCE = "/moving_variance"


@dataclass(frozen=True)
class Result:
    """What was found."""

    unmatched: Sequence[tuple[str, Any, Any]]  # names that do not fit, with the shapes in both frameworks
    rows: Sequence[Row]  # the layers that both call
    steps: Comparison  # how far steps are apart
    findings: Sequence[Finding]  # causes, in the order of the computation
    divergence: str  # where the models begin to differ; empty if they do not
    notes: Sequence[str]
    is_wide: bool = True  # whether both compute in fp64

    @property
    def has_parity(self) -> bool:
        """Whether the models compute the same but for rounding."""
        return not self.findings and self.can_compare

    @property
    def can_compare(self) -> bool:
        """Whether the parameters fit together, but for biases that only one framework has."""
        return all((one is None) != (other is None) and is_bias(name) for name, one, other in self.unmatched)


def is_bias(name: str) -> bool:
    """Return whether a parameter is a bias, without which the rest can be compared."""
    return name.rpartition("/")[2] in ("bias", "beta")


def judge(left: Observation, right: Observation) -> Result:
    """Return what differs of PyTorch's model (left) and TensorFlow's (right), and why."""
    unmatched = list(_unmatched(left.initial, right.initial))
    result = Result(unmatched, [], Comparison(), [], "", [])
    if not result.can_compare:
        return Result(unmatched, [], Comparison(), [], "", [_remedy(left.initial, right.initial)])
    is_wide = not (left.note or right.note)
    layers, movements, losses = _PLACES[is_wide]
    start = {name: array for name, array in left.initial.items() if name in right.initial}
    rows = make_rows(left.forward, right.forward, start)
    findings = [*_of_initial(left, right, unmatched), *_of_observations(left, right)]
    is_random = bool(left.random_layers or right.random_layers)
    settings = [one for _, one in different_settings(rows, layers)]
    if any(one.suspect == "rate" for one in settings):  # of a layer that is known
        findings = [one for one in findings if one.suspect != "dropout rate"]
    findings += settings
    found = None if is_random else first_divergence(rows, layers)
    divergence = ""
    if found is not None:
        apart = f"{found.apart.relative:.1e} relative, {found.apart.absolute:.1e} absolute"
        divergence = f"{place_of(found)}: {apart}; what comes before it agrees"
        known = [one for one in settings if one.layer == found.row.layer and one.suspect != MOMENTUM]
        if not known or found.before:
            findings.append(explain(found, start))
    elif not is_random and (of_loss := _of_losses(left, right, losses)) is not None:
        findings.append(of_loss)
    rounding = Rounding(
        start,
        [n for n in left.trained if n in right.trained],
        limits=(movements, 1e-9 if is_wide else 3e-7, losses),
    )
    steps = compare(_run(left), _run(right), rounding)
    is_known = divergence or is_random or any(one.suspect in _BEFORE_STEPS for one in findings)
    if steps.step and not is_known and not (settings and steps.name.endswith("/moving_mean")):
        findings.append(_of_steps(left, right, steps, start))
    notes = [one.note for one in (left, right) if one.note]
    notes.insert(
        0, f"made equal beforehand: the initial values of {counted(len(start), 'array')}, to PyTorch's"
    )
    if rates := sorted({*left.dropout_rates, *right.dropout_rates}):
        notes.append(f"dropout (rates {', '.join(f'{rate:g}' for rate in rates)}) is off in the steps")
    if any(name.endswith(_VARIANCE) for name in start):
        notes.append(
            "moving variances are not compared: PyTorch's batch norm takes n / (n - 1) times the batch's "
            "variance, Keras's the variance itself"
        )
    return Result(unmatched, rows, steps, findings, divergence, notes, is_wide)


_BEFORE_STEPS = (
    "loss that is not finite",
    "loss",
    "random numbers in training",
    "data",
    MISSING_BIAS,
    "frozen parameters",
)


def _unmatched(left: PortableState, right: PortableState) -> Iterator[tuple[str, Any, Any]]:
    for name in [*left, *(name for name in right if name not in left)]:
        one, other = (tuple(side[name].shape) if name in side else None for side in (left, right))
        if one != other and name.startswith("model/"):
            yield name.removeprefix("model/"), one, other


def _remedy(left: PortableState, right: PortableState) -> str:
    """Return a line of ``state_names`` that makes the names fit; empty if there is none."""
    try:
        check_state({name: tuple(array.shape) for name, array in left.items()}, right, "torch")
    except TaskError as error:
        return error.remedy
    return ""


def _run(one: Observation) -> Run:
    arrays = {
        step: {name: array for name, array in state.items() if not name.endswith(_VARIANCE)}
        for step, state in one.arrays.items()
    }
    return Run({step: one.losses[step] for step in arrays}, lambda step: arrays[step], {})


def _of_initial(left: Observation, right: Observation, unmatched: Any) -> Iterator[Finding]:
    for name, one, _ in unmatched:
        has, has_not = ("TensorFlow", "PyTorch") if one is None else ("PyTorch", "TensorFlow")
        text = f"{has_not} has no {name}, {has} has it: give both a bias, or neither"
        yield Finding(MISSING_BIAS, name.rpartition("/")[0], text)
    yield from different_beginnings(left.own, right.own)
    apart = []
    for name, one in left.initial.items():
        other = right.initial.get(name)
        if other is not None and other.shape == one.shape and difference(one, other).relative > 1e-6:
            apart.append((name.removeprefix("model/"), one, other))
    if apart:
        name, one, other = apart[0]
        text = f"{name} differs by up to {difference(one, other).absolute:.3g}"
        if factor := constant_factor(one, other):
            text += f"; PyTorch's is {factor:.6g} times TensorFlow's"
        more = f"; so do {len(apart) - 1} others" if len(apart) > 1 else ""
        yield Finding(
            "initial value",
            name.rpartition("/")[0],
            f"{text}{more}. For equal values: --initial-parameters portable, or --init",
        )


def _of_observations(left: Observation, right: Observation) -> Iterator[Finding]:
    """Yield what differs of data, random numbers, and of what is trained and how."""
    pairs = ((left, right, "PyTorch", "TensorFlow"), (right, left, "TensorFlow", "PyTorch"))
    differ = [
        step
        for step, pair in enumerate(zip(left.batches, right.batches, strict=False), 1)
        if len({*pair}) > 1
    ]
    if differ:
        yield Finding(
            "data",
            f"step {differ[0]}",
            "the frameworks are given other samples: the task's data depend on the framework, or on chance",
        )
    for side, other, title, other_title in pairs:
        for layer in side.random_layers:
            yield Finding(
                "dropout left on",
                layer,
                f"in evaluation, {title} gives other outputs in two passes with the same samples",
            )
        if side.is_random_in_training and not side.random_layers:
            yield Finding("random numbers in training", "the model",
                          f"{title}'s loss differs between two passes with the same samples though "
                          f"dropout layers are off; "
                          "steps cannot be compared: set the rates of dropout that is no layer to "
                          "0")  # fmt: skip
        names = [name for name in side.trained if name not in other.trained and name in other.initial]
        if names:
            more = f"; so with {len(names) - 1} others" if len(names) > 1 else ""
            name = names[0].removeprefix("model/")
            yield Finding(
                "frozen parameters",
                name.rpartition("/")[0],
                f"{title} trains {name}, and {other_title} does not{more}",
            )
        bad = [step for step, loss in side.losses.items() if not math.isfinite(loss)]
        if bad:
            yield Finding(
                "loss that is not finite",
                "the loss",
                f"{title}'s is {side.losses[bad[0]]} in step {bad[0]}: lower the learning rate",
            )
    rates = [sorted(set(side.dropout_rates)) for side in (left, right)]
    if rates[0] != rates[1] and not (left.random_layers or right.random_layers):
        yield Finding("dropout rate", "the model", f"{rates[0]} in PyTorch, {rates[1]} in TensorFlow")
    for name, value in left.optimizer.items():
        other_value = right.optimizer.get(name, value)
        same = (
            math.isclose(value, other_value, rel_tol=1e-6)
            if isinstance(value, float)
            else value == other_value
        )
        if name != "class" and not same:
            yield Finding(
                f"{name} of the optimizer",
                "the optimizer",
                f"{value} in PyTorch, {other_value} in TensorFlow",
            )


def _of_losses(left: Observation, right: Observation, most: float) -> Finding | None:
    """Return why the losses of samples differ though outputs do not."""
    one, other = left.forward.losses, right.forward.losses
    if one.shape != other.shape:
        return Finding(
            "loss",
            "the loss",
            f"PyTorch's has shape {one.shape}, TensorFlow's {other.shape}: one of them takes a mean "
            f"over the samples",
        )
    if difference(one, other).relative <= most:
        return None
    factor = constant_factor(one, other)
    text = (
        f"PyTorch's is {factor:.6g} times TensorFlow's"
        if factor
        else f"it differs by {difference(one, other).relative:.1e}"
    )
    return Finding("loss", "the loss", f"{text}, though the model's outputs agree")


def _of_steps(left: Observation, right: Observation, found: Comparison, start: PortableState) -> Finding:
    """Return why the first step that differs does, though evaluations agree."""
    if constraints := right.optimizer.get("constraints"):
        return Finding(
            "constraint",
            "the optimizer",
            f"TensorFlow applies {constraints} after each update, and PyTorch does not",
        )
    place = found.name.removeprefix("model/") or "the loss"
    layer = place.rpartition("/")[0] or place
    text = f"step {found.step}, {place}: in TensorFlow, {found.text}"
    if found.name in start and found.step == 1:
        more = right.arrays[1][found.name].astype(float) - left.arrays[1][found.name]
        if constant_factor(more, start[found.name].astype(float)) is not None:
            text += (
                ", by a multiple of its initial value: an L2 term, such as a regularizer, in one framework"
            )
            return Finding("regularizer", layer, text)
    if found.name.endswith("/moving_mean"):
        return Finding(MOMENTUM, layer, text)
    if not found.name:
        return Finding(
            "loss in training",
            "the loss",
            f"{text}, though evaluations agree: look for a loss that is added in training",
        )
    classes = [side.optimizer.get("class", "?") for side in (left, right)]
    advice = f"compare what is done in training alone, and the optimizers ({' and '.join(classes)})"
    return Finding("update", layer, f"{text}, though evaluations agree: {advice}")
