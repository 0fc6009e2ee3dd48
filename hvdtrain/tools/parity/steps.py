"""How far gradients and parameters are apart in training, and why."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.backends.records import PortableState
from hvdtrain.tools.parity.findings import (
    CLASS,
    CONSTRAINTS,
    MOMENTUM,
    Finding,
    constant_factor,
    different_optimizers,
)
from hvdtrain.tools.parity.observation import Array, Difference, Observation, difference
from hvdtrain.tools.parity.rows import FP64, Limits

_LEAST_MOVEMENT = 1e-3  # smaller parts of the largest movement of all parameters count as rounding
_LEAST_NUMBER = 1e-10  # and so do smaller parts of the parameter itself


def moved_apart(
    left: PortableState, right: PortableState, start: PortableState, names: Iterable[str]
) -> dict[str, float]:
    """Return how far apart parameters are, relative to their movements, by portable name.

    It is told by root mean squares: Adam makes much of the rounding of a few small gradients.

    Args:
        left: PyTorch's parameters after steps.
        right: TensorFlow's.
        start: what both started from.
        names: names of what training changes.
    """
    names = [name for name in names if all(name in state for state in (left, right, start))]
    moved = {name: max(_size(state[name] - start[name]) for state in (left, right)) for name in names}
    largest = max(moved.values(), default=0.0)
    found = {}
    for name in names:
        apart = _size(left[name] - right[name])
        least = max(_LEAST_MOVEMENT * largest, _LEAST_NUMBER * _size(start[name]))
        found[name] = apart / max(moved[name], least) if apart else 0.0
    return found


def _size(array: Array) -> float:
    """Return the root of the mean square; 0 of an empty array."""
    return float(np.sqrt(np.square(array, dtype=np.float64).mean())) if array.size else 0.0


_FLOOR = 1e-3  # numbers that are smaller than this part of the largest of all arrays count as rounding
_LARGEST = 1.5  # of n / (n - 1): batches of three numbers and more
_NEAR_INTEGER = 1e-3
_REPORTED = 1e-6  # of losses, which steps report in 32 bits in fp64, too
_VARIANCE = "/moving_variance"
_STATISTICS = ("/moving_mean", _VARIANCE)


@dataclass(frozen=True)
class StepRow:
    """A training step of both frameworks."""

    step: int  # its number
    loss: Difference  # how far its loss is apart
    # how far each gradient is apart, by portable name
    gradients: dict[str, Difference] = field(default_factory=dict)
    parameters: dict[str, Difference] = field(default_factory=dict)  # the same of the arrays after the update


def step_rows(left: Observation, right: Observation) -> list[StepRow]:
    """Return the steps that both have, side by side."""
    others = {state.step: state for state in right.steps}
    rows = []
    for state in left.steps:
        other = others.get(state.step)
        if other is None:
            break
        low = abs(state.loss - other.loss)
        loss = Difference(low, low / max(abs(state.loss), 1e-300))
        if math.isnan(state.loss) and math.isnan(other.loss):
            loss = Difference(0.0, 0.0)
        rows.append(
            StepRow(
                state.step,
                loss,
                _apart(state.gradients, other.gradients),
                _apart(state.parameters, other.parameters),
            )
        )
    return rows


def worst(found: dict[str, Difference]) -> tuple[str, Difference]:
    """Return the name and the difference of what is furthest apart."""
    if not found:
        return "", Difference(0.0, 0.0)
    name = max(found, key=lambda one: found[one].relative)
    return name, found[name]


def _apart(left: PortableState, right: PortableState) -> dict[str, Difference]:
    names = [name for name in left if name in right and left[name].shape == right[name].shape]
    floats = [name for name in names if left[name].dtype.kind == "f"]
    largest = max((float(abs(left[name]).max(initial=0.0)) for name in floats), default=0.0)
    scale = _FLOOR * largest if math.isfinite(largest) else 0.0
    return {name: difference(left[name], right[name], scale) for name in floats}


def of_gradients(
    left: Observation, right: Observation, rows: list[StepRow], start: PortableState, *, limits: Limits
) -> list[Finding]:
    """Return why loss or gradients of the first step differ, if they do; of several, the last layer's.

    A wrong gradient spreads to the layers before it.
    """
    if not rows:
        return []
    by = f"the loss in training differs by {rows[0].loss.relative:.1e}"
    has_other_loss = rows[0].loss.relative > max(limits.losses, _REPORTED)
    differing = [name for name, apart in rows[0].gradients.items() if apart.relative > limits.losses]
    if not differing:
        advice = "though losses in evaluation and gradients agree: look for a loss that is added in training"
        return [Finding("loss in training", "the loss", f"{by}, {advice}")] if has_other_loss else []
    if (penalty := _penalty(left, right, differing, start)) is not None:
        return [penalty]
    name = differing[-1]
    one, other = left.steps[0].gradients[name], right.steps[0].gradients[name]
    text = f"the gradient of {name.removeprefix('model/')} differs by {rows[0].gradients[name].relative:.1e}"
    zero = "PyTorch" if not one.any() else "TensorFlow" if not other.any() else ""
    if zero:
        text += f"; it is zero in {zero}: a detached output, or a layer that does not train"
    elif (factor := constant_factor(one, other)) is not None:
        text += f"; PyTorch's is {factor:.6g} times TensorFlow's"
    else:
        text += (
            ", though outputs in evaluation agree: look at what the model or the loss does in training alone"
        )
    if len(differing) > 1:
        text += f"; {len(differing) - 1} others differ, too"
    if has_other_loss:
        text += f"; {by}"
    return [Finding("gradient", _layer(name), text)]


def _penalty(left: Observation, right: Observation, names: list[str], start: PortableState) -> Finding | None:
    """Return the finding of gradients that differ by a multiple of the parameters, or of their signs."""
    found = []
    for name in [name for name in names if name in start]:
        more = right.steps[0].gradients[name] - left.steps[0].gradients[name]
        for kind, term, share in (("L2", start[name], 2), ("L1", np.sign(start[name]), 1)):
            factor = constant_factor(more, term)
            if factor is not None:
                found.append((name, kind, factor / share))
                break
    if not found:
        return None
    name, kind, factor = found[-1]
    has, has_not = ("TensorFlow", "PyTorch") if factor > 0 else ("PyTorch", "TensorFlow")
    return Finding(
        "regularizer",
        _layer(name),
        f"{has}'s loss has an {kind} term of {abs(factor):.4g}, such as a layer's regularizer, on "
        f"{', '.join(one.removeprefix('model/') for one, *_ in found)} in training, and {has_not}'s does not",
    )


def of_updates(
    left: Observation, right: Observation, rows: list[StepRow], start: PortableState, *, limits: Limits
) -> tuple[list[Finding], list[str]]:
    """Return why parameters differ after steps though gradients do not, and notes on what is no mistake."""
    findings = list(different_optimizers(left.optimizer, right.optimizer))
    if not rows:
        return findings, []
    # of all names: with large batches they differ by less than the limit after a step, and by more later
    usual = _usual_variances(left, right, list(rows[0].parameters), start)
    notes = list(usual.values())[:1]
    frozen = set(left.trained) ^ set(right.trained)  # which are a finding of their own
    for row in rows[:1] if frozen else rows:
        if not math.isfinite(row.loss.relative):
            break  # that is a finding of its own
        differing = {name: apart.relative for name, apart in row.parameters.items()}
        if limits.steps <= FP64.steps:  # else rounding may be as large as a small movement
            differing |= moved_apart(*_arrays(left, right, row), start, left.trained)
        differing = {
            name: apart
            for name, apart in differing.items()
            if apart > limits.steps and name not in usual and name not in frozen
        }
        if differing:
            constraints = right.optimizer.get(CONSTRAINTS, {})
            constrained = [one for one in differing if one in constraints]
            name = next(iter(differing))
            if constrained:
                findings.append(_constraint(constrained, constraints))
            elif not findings or name.endswith(_STATISTICS):  # the optimizers' settings explain the others
                findings.append(_why((left, right), row, name, differing[name], start))
            break
    return findings, notes


def _arrays(left: Observation, right: Observation, row: StepRow) -> tuple[PortableState, PortableState]:
    left_state, right_state = (
        next(state for state in side.steps if state.step == row.step) for side in (left, right)
    )
    return left_state.parameters, right_state.parameters


def _why(
    sides: tuple[Observation, Observation], row: StepRow, name: str, apart: float, start: PortableState
) -> Finding:
    one, other = (arrays[name] for arrays in _arrays(*sides, row))
    steps = f"{row.step} steps" if row.step > 1 else "a step"
    text = f"{name.removeprefix('model/')} differs by {apart:.1e} after {steps}"
    if name.endswith(_STATISTICS):
        return Finding(MOMENTUM, _layer(name), f"{text}: other parts of the old statistics are kept")
    if apart > row.parameters[name].relative:
        text += ", relative to what these moved it"
    factor = constant_factor(one - start[name], other - start[name]) if name in start else None
    if factor is not None:
        text += f"; PyTorch moves it {factor:.6g} times as far as TensorFlow"
        if name.endswith("/bias") and abs(factor - 2) < _NEAR_INTEGER:
            text += (
                ": PyTorch's recurrent layers have two biases, and both learn; give bias=False, or freeze one"
            )
    advice = "compare the optimizers"
    classes = [side.optimizer.get(CLASS) for side in sides]
    if all(classes):
        advice += f", {classes[0]} in PyTorch, {classes[1]} in TensorFlow"
    if row.step > 1:
        advice += ", or lower the learning rate: an unstable training makes much of rounding"
    return Finding("update", _layer(name), f"{text}, though the first gradients agree: {advice}")


def _constraint(names: Sequence[str], constraints: Mapping[str, str]) -> Finding:
    kinds = ", ".join(f"{constraints[name]} on {name.removeprefix('model/')}" for name in names)
    text = f"TensorFlow applies {kinds} after each update, and PyTorch does not: do it in both, or in neither"
    return Finding("constraint", _layer(names[0]), text)


def _usual_variances(
    left: Observation, right: Observation, names: list[str], start: PortableState
) -> dict[str, str]:
    """Return moving variances that differ by n / (n - 1) alone, each with a note."""
    found = {}
    kept = {
        call.path: call.settings.get("kept statistics")
        for side in (left, right)
        for call in side.forward.calls
    }
    for name in names:
        if not name.endswith(_VARIANCE) or not (rate := kept.get(_layer(name))) or name not in start:
            continue
        old: Array = rate * start[name].astype(float)
        factor = constant_factor(left.steps[0].parameters[name] - old, right.steps[0].parameters[name] - old)
        count = factor / (factor - 1) if factor is not None and 1 < factor < _LARGEST else 0.0
        if count and abs(count - round(count)) < _NEAR_INTEGER * count:
            found[name] = (
                f"{name.removeprefix('model/')}: PyTorch's moving variance takes n / (n - 1) times the "
                f"batch's, here n = {round(count):,}; Keras's takes it as it is. This changes "
                "evaluations alone"
            )
    return found


def _layer(name: str) -> str:
    return name.removeprefix("model/").rpartition("/")[0]
