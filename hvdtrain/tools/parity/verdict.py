"""What differs of PyTorch's model and TensorFlow's, and why: the first layer, and the first step."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hvdtrain.backends.portable.names import check_state
from hvdtrain.backends.records import PortableState
from hvdtrain.errors import TaskError
from hvdtrain.storage.text import counted
from hvdtrain.tools.parity.observation import (
    LEAST,
    MOMENTUM,
    OUTPUTS,
    Array,
    Divergence,
    Observation,
    Row,
    constant_factor,
    difference,
    first_divergence,
    make_rows,
)
from hvdtrain.tools.parity.proof import Comparison, Rounding, Run, compare

_PLACES = {True: (1e-6, 1e-3, 1e-6), False: (1e-4, 1e-2, 1e-3)}  # of layers, movements, losses; in fp64, not
_VARIANCE = "/moving_variance"
_SAME = 1e-9  # relative; of settings
_CONVOLUTION = (
    ", such as padding: Keras's 'same' with strides adds what is odd behind; pad with "
    "torch.nn.functional.pad, or with keras.layers.ZeroPadding2D"
)
# what makes steps differ, and is named before them
_BEFORE_STEPS = (
    *("loss that is not finite", "loss", "random numbers in training", "data", "missing bias"),
    "frozen parameters",
)


@dataclass(frozen=True)
class Finding:
    """One cause of a difference."""

    suspect: str  # what it is, such as "epsilon"
    layer: str  # the layer's portable path, or what else it is of
    text: str  # both frameworks' numbers, and what to do


@dataclass(frozen=True)
class Result:
    """What was found."""

    unmatched: Sequence[tuple[str, Any, Any]]  # names that do not fit, with the shapes in both frameworks
    notes: Sequence[str]
    rows: Sequence[Row] = ()  # the layers that both call
    steps: Comparison = field(default_factory=Comparison)  # how far steps are apart
    findings: Sequence[Finding] = ()  # causes, in the order of the computation
    divergence: str = ""  # where the models begin to differ; empty if they do not
    is_wide: bool = True  # whether both compute in fp64

    @property
    def has_parity(self) -> bool:
        """Whether the models compute the same but for rounding."""
        return not self.findings and self.can_compare

    @property
    def can_compare(self) -> bool:
        """Whether the parameters fit together, but for biases that only one framework has."""
        return all(
            (one is None) != (other is None) and name.rpartition("/")[2] in ("bias", "beta")
            for name, one, other in self.unmatched
        )


def judge(left: Observation, right: Observation) -> Result:
    """Return what differs of PyTorch's model (left) and TensorFlow's (right), and why."""
    unmatched = list(_unmatched(left.initial, right.initial))
    if not Result(unmatched, []).can_compare:
        return Result(unmatched, [_remedy(left.initial, right.initial)])
    is_wide = not (left.note or right.note)
    layers, movements, losses = _PLACES[is_wide]
    start = {name: array for name, array in left.initial.items() if name in right.initial}
    rows = make_rows(left.forward, right.forward, start)
    findings = [*_of_initial(left, right, unmatched), *_of_observations(left, right)]
    is_random = bool(left.random_layers or right.random_layers)
    settings = list(different_settings(rows))
    findings += settings
    found = None if is_random else first_divergence(rows, layers)
    divergence = ""
    if found is not None:
        apart = f"{found.apart.relative:.1e} relative, {found.apart.absolute:.1e} absolute"
        divergence = f"{found.place}: {apart}; what comes before it agrees"
        known = [one for one in settings if one.layer == found.row.left.path and one.suspect != MOMENTUM]
        if not known or found.before:
            findings.append(explain(found))
    elif not is_random:
        findings += _of_losses(left, right, losses)
    trained = [name for name in left.trained if name in right.trained]
    limits = movements, 1e-9 if is_wide else 3e-7, losses
    steps = compare(_run(left), _run(right), Rounding(start, trained, limits=limits))
    is_known = divergence or is_random or any(one.suspect in _BEFORE_STEPS for one in findings)
    if steps.step and not is_known and not (settings and steps.name.endswith("/moving_mean")):
        findings.append(_of_steps(left, right, steps))
    notes = [f"made equal beforehand: the initial values of {counted(len(start), 'array')}, to PyTorch's"]
    notes += [one.note for one in (left, right) if one.note]
    if rates := sorted({*left.dropout_rates, *right.dropout_rates}):
        notes.append(f"dropout (rates {', '.join(f'{rate:g}' for rate in rates)}) is off in the steps")
    if any(name.endswith(_VARIANCE) for name in start):
        notes.append(
            "moving variances are not compared: PyTorch's batch norm takes n / (n - 1) times the batch's "
            "variance, Keras's the variance itself"
        )
    return Result(unmatched, notes, rows, steps, findings, divergence, is_wide)


def _unmatched(left: PortableState, right: PortableState) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*left, *right]):
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
        yield Finding("missing bias", name.rpartition("/")[0], text)
    pairs = {name: (one, right.initial[name]) for name, one in left.initial.items() if name in right.initial}
    apart = {
        name: found
        for name, pair in pairs.items()
        if pair[0].shape == pair[1].shape and (found := difference(*pair)).relative > 1e-6
    }
    for name in [*apart][:1]:
        own, factor = name.removeprefix("model/"), constant_factor(*pairs[name])
        scaled = f"; PyTorch's is {factor:.6g} times TensorFlow's" if factor else ""
        text = f"{own} differs by up to {apart[name].absolute:.3g}{scaled}{_others(apart)}"
        remedy = "For equal values: --initial-parameters portable, or --init"
        yield Finding("initial value", own.rpartition("/")[0], f"{text}. {remedy}")


def _others(names: Any) -> str:
    return f"; so with {len(names) - 1} others" if len(names) > 1 else ""


def _of_observations(left: Observation, right: Observation) -> Iterator[Finding]:
    """Yield what differs of data, random numbers, and of what is trained and how."""
    pairs = zip(left.batches, right.batches, strict=False)
    for step in [step for step, (one, other) in enumerate(pairs, 1) if one != other][:1]:
        text = "the frameworks are given other samples: the task's data depend on the framework, or on chance"
        yield Finding("data", f"step {step}", text)
    titles = ("PyTorch", "TensorFlow")
    for (title, other_title), side, other in ((titles, left, right), (titles[::-1], right, left)):
        for layer in side.random_layers:
            text = f"in evaluation, {title} gives other outputs in two passes with the same samples"
            yield Finding("dropout left on", layer, text)
        if side.is_random_in_training and not side.random_layers:
            yield Finding("random numbers in training", "the model", (
                f"{title}'s loss differs between two passes with the same samples though dropout layers are "
                "off; steps cannot be compared: set the rates of dropout that is no layer to 0"
            ))  # fmt: skip
        names = [name for name in side.trained if name not in other.trained and name in other.initial]
        for name in [name.removeprefix("model/") for name in names[:1]]:
            text = f"{title} trains {name}, and {other_title} does not{_others(names)}"
            yield Finding("frozen parameters", name.rpartition("/")[0], text)
        for step in [step for step, loss in side.losses.items() if not math.isfinite(loss)][:1]:
            text = f"{title}'s is {side.losses[step]} in step {step}: lower the learning rate"
            yield Finding("loss that is not finite", "the loss", text)
    ours, theirs = (sorted(set(side.dropout_rates)) for side in (left, right))
    if ours != theirs and not (left.random_layers or right.random_layers):
        yield Finding("dropout rate", "the model", f"{ours} in PyTorch, {theirs} in TensorFlow")


def _of_losses(left: Observation, right: Observation, most: float) -> Iterator[Finding]:
    """Yield why the losses of samples differ though outputs do not."""
    one, other = left.forward.losses, right.forward.losses
    if one.shape != other.shape:
        text = f"PyTorch's has shape {one.shape}, TensorFlow's {other.shape}: one is a mean over the samples"
        yield Finding("loss", "the loss", text)
    elif (apart := difference(one, other).relative) > most:
        factor = constant_factor(one, other)
        how = f"PyTorch's is {factor:.6g} times TensorFlow's" if factor else f"it differs by {apart:.1e}"
        yield Finding("loss", "the loss", f"{how}, though the model's outputs agree")


def _of_steps(left: Observation, right: Observation, found: Comparison) -> Finding:
    """Return why the first step that differs does, though evaluations agree."""
    place = found.name.removeprefix("model/") or "the loss"
    layer = place.rpartition("/")[0] or place
    text = f"step {found.step}, {place}: in TensorFlow, {found.text}"
    if found.name.endswith("/moving_mean"):
        return Finding(MOMENTUM, layer, text)
    text += ", though evaluations agree: "
    if not found.name:
        return Finding("loss in training", layer, f"{text}look for a loss that is added in training")
    classes = f"{left.optimizer} and {right.optimizer}"
    advice = f"compare regularizers, constraints, and what the optimizers ({classes}) were made with"
    return Finding("update", layer, text + advice)


def is_reordered(left: Array, right: Array) -> bool:
    """Return whether each sample has the same numbers in another order."""
    if left.shape != right.shape or left.ndim < 2:
        return False
    one, other = (np.sort(array.reshape(len(array), -1), axis=1) for array in (left, right))
    return one.shape[1] > 1 and difference(one, other).relative < LEAST


def different_settings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Yield what layers were made with that differs."""
    for row in [one for one in rows if one.path == one.left.path]:
        for name, value in row.left.settings.items():
            other = row.right.settings.get(name, value)
            if math.isclose(value, other, rel_tol=_SAME):
                continue
            if name == MOMENTUM:
                text = (
                    f"PyTorch keeps {value:g} of the old statistics, Keras {other:g}: PyTorch's momentum is "
                    "1 - Keras's"
                )
            else:
                text = f"{value:g} in PyTorch, {other:g} in TensorFlow"
            yield Finding(name, row.left.path, text)


def explain(divergence: Divergence) -> Finding:
    """Return why two models begin to differ at a place, as far as the arrays there show."""
    row, place = divergence.row, divergence.place
    is_between = divergence.before or row.left.path == OUTPUTS
    pair = row.input_arrays if is_between else row.output_arrays
    if not is_between:
        for what in ("inputs", "outputs"):
            left, right = getattr(row.left, what), getattr(row.right, what)
            if left is not None and right is not None and getattr(row, what) is None:
                text = f"PyTorch's {what} have shape {left.shape}, TensorFlow's {right.shape}"
                return Finding("shape", place, text)
    if is_between and pair is not None and is_reordered(*pair):
        return Finding("layout", place, (
            "both have the same numbers in another order: PyTorch flattens channels first, Keras last; "
            "permute before flattening"
        ))  # fmt: skip
    if pair is not None and (factor := constant_factor(*pair)) is not None:
        return Finding("scale", place, f"PyTorch's numbers are {factor:.6g} times TensorFlow's")
    apart = f"{divergence.apart.relative:.1e}"
    if divergence.before:
        text = (
            f"the inputs of {row.path} differ by {apart}, and the outputs of all layers before it do not: "
            "look at what the models compute between layers, such as the form of GELU"
        )
    elif row.left.path == OUTPUTS:
        text = f"the outputs differ by {apart}, and those of all layers that both have do not"
    else:
        text = (
            f"{row.left.kind} in PyTorch, {row.right.kind} in TensorFlow: outputs differ by {apart} for the "
            "same inputs; compare what they were made with" + _CONVOLUTION * ("Conv" in row.left.kind)
        )
    return Finding("unknown", place, text)
