"""The verdict on two models: what was compared, what differs, and whether it is rounding."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.backends.records import PortableState
from hvdtrain.tools.parity.explanation import explain, place_of
from hvdtrain.tools.parity.findings import (
    FROZEN,
    MISSING_BIAS,
    MOMENTUM,
    Finding,
    constant_factor,
    different_settings,
    not_finite,
    of_observations,
)
from hvdtrain.tools.parity.observation import LOSS, Array, Observation, difference
from hvdtrain.tools.parity.rows import (
    FP64,
    OUTPUTS,
    PARTLY_FP32,
    Limits,
    Row,
    first_divergence,
    limits_of,
    make_rows,
    only_on_one_side,
)
from hvdtrain.tools.parity.steps import StepRow, of_gradients, of_updates, step_rows

_TINY = 1e-300


def of_precision(
    left: Observation, right: Observation, rows: Sequence[Row], limits: Limits, precision: str
) -> list[Finding]:
    """Return what is further apart in the job's precision than rounding explains.

    Layers count only if outputs differ: within, rounding of numbers that nearly cancel may be large.

    Args:
        left: PyTorch's observation in the job's precision.
        right: TensorFlow's.
        rows: the layers that both call, and at last the model's outputs.
        limits: what counts as rounding in the job's precision.
        precision: what it is.
    """
    advice = f"in {precision}, and not in fp64: one framework computes there in fewer bits, or overflows"
    ours, others = left.forward.losses, right.forward.losses
    differ = ours.shape == others.shape and difference(ours, others).relative > limits.losses
    if differ or any(row.layer == OUTPUTS and row.differs(limits.forward) for row in rows):
        found = first_divergence(rows, limits.forward)
        if found is not None:
            return [Finding("precision", place_of(found), f"differs by {found.apart.relative:.1e} {advice}")]
        return [
            Finding("precision", "the loss", f"differs by {difference(ours, others).relative:.1e} {advice}")
        ]
    if not left.steps or not right.steps or precision == "fp16":  # whose gradients need the scale of the loss
        return []
    apart = _apart(left.steps[0].gradients, right.steps[0].gradients)
    if apart > limits.losses:
        return [Finding("precision", "the gradients", f"of the first step differ by {apart:.1e} {advice}")]
    return []


def _apart(left: PortableState, right: PortableState) -> float:
    """Return how far all gradients together are apart, relative to their norm."""
    names = [name for name in left if name in right and left[name].shape == right[name].shape]
    apart = _norm([left[name].astype(np.float64) - right[name] for name in names])
    return apart / max(_norm([left[name] for name in names]), _TINY)


def _norm(arrays: Sequence[Array]) -> float:
    return float(np.sqrt(sum(np.square(array, dtype=np.float64).sum() for array in arrays)))


_CLOSE = 1e-5
_SHIFTS = (0, 1, -1, 2, -2)


def explain_losses(left: Array, right: Array, outputs: Array | None, targets: Array | None) -> str:
    """Return why the losses of samples differ, in words; empty if that is not found.

    Args:
        left: PyTorch's.
        right: TensorFlow's.
        outputs: the model's, which are the same in both frameworks.
        targets: the batch's.
    """
    if left.shape != right.shape:
        return (
            f"PyTorch's loss has shape {left.shape}, TensorFlow's {right.shape}: one of them takes a mean "
            "over the samples"
        )
    words = [
        _label_shift(losses, outputs, targets) if outputs is not None and targets is not None else ""
        for losses in (left, right)
    ]
    if all(words) and words[0] != words[1]:
        return f"PyTorch's loss compares {words[0]}, TensorFlow's {words[1]}"
    factor = constant_factor(left, right)
    if factor is not None:
        return f"scale of the loss: PyTorch's is {factor:.6g} times TensorFlow's"
    if any(words):
        known, other = ("PyTorch", "TensorFlow") if words[0] else ("TensorFlow", "PyTorch")
        return (
            f"{known}'s loss compares {words[0] or words[1]} by cross-entropy, {other}'s does something else"
        )
    return ""


def _label_shift(losses: Array, outputs: Array, targets: Array) -> str:
    """Return which outputs the cross-entropy that gives these losses compares with which labels."""
    if targets.dtype.kind not in "iu" or losses.ndim != 1 or outputs.ndim != targets.ndim + 1:
        return ""
    for words, found in _cross_entropies(outputs.astype(np.float64), targets.astype(np.int64)):
        if any(difference(one, losses).relative < _CLOSE for one in found):
            return words
    return ""


def _cross_entropies(outputs: Array, targets: Array) -> Iterator[tuple[str, list[Array]]]:
    """Yield words for a shift of the labels, and the cross-entropy of each sample with it."""
    for shift in _SHIFTS:
        if targets.ndim > 1:  # along the positions of a sequence
            logits, labels = _shifted(outputs, targets, shift)
            if labels.shape[1]:
                of_position = f"with the label {abs(shift)} {'after' if shift > 0 else 'before'} it"
                yield (
                    f"each position {of_position if shift else 'with its own label'}",
                    _means(logits, labels, targets.shape[1]),
                )
    for shift in _SHIFTS:
        labels = targets + shift
        if labels.min() >= 0 and labels.max() < outputs.shape[-1]:
            words = f"with the label {shift:+d}" if shift else "with the label as it is"
            yield words, _means(outputs, labels, 0)


def _shifted(outputs: Array, targets: Array, shift: int) -> tuple[Array, Array]:
    if shift > 0:
        return outputs[:, :-shift], targets[:, shift:]
    return (outputs[:, -shift:], targets[:, :shift]) if shift else (outputs, targets)


def _means(logits: Array, labels: Array, positions: int) -> list[Array]:
    """Return the mean cross-entropy of each sample, and its sum, and the sum / all positions."""
    if labels.min() < 0 or labels.max() >= logits.shape[-1]:
        return []
    largest = logits.max(-1, keepdims=True)
    logs = logits - largest - np.log(np.exp(logits - largest).sum(-1, keepdims=True))
    each = -np.take_along_axis(logs, labels[..., None], -1)[..., 0].reshape(len(labels), -1)
    sums = each.sum(1)
    return [each.mean(1), sums, *([sums / positions] if positions else [])]


@dataclass(frozen=True)
class Comparison:
    """Two observations side by side."""

    left: Observation  # PyTorch's
    right: Observation  # TensorFlow's
    rows: Sequence[Row]  # the layers that both call
    steps: Sequence[StepRow]  # the training steps

    @classmethod
    def of(cls, left: Observation, right: Observation) -> "Comparison":
        """Compare."""
        names = left.steps[0].parameters if left.steps else ()
        rows = make_rows(left.forward, right.forward, names)
        return cls(left, right, rows, step_rows(left, right))


@dataclass(frozen=True)
class Verdict:
    """What was found."""

    usual: Comparison  # the comparison in the job's precision
    fp64: Comparison | None  # that in fp64; None if the models cannot compute in it
    findings: Sequence[Finding]  # causes of differences, in the order of the computation
    limits: Limits  # what counts as rounding, in fp64 or, without it, in the job's precision
    divergence: str = ""  # where the models begin to differ, in words; empty if they do not
    notes: Sequence[str] = field(default=())  # what else to tell the user

    @property
    def has_parity(self) -> bool:
        """Whether the models compute the same but for rounding."""
        return not self.findings


def judge(
    usual: Comparison,
    fp64: Comparison | None,
    start: PortableState,
    early: Sequence[Finding] = (),
    *,
    precision: str = "fp32",
) -> Verdict:
    """Return what differs of two models, and why.

    Args:
        usual: the comparison in the job's precision.
        fp64: that in fp64, if there is one.
        start: the parameters that both started from.
        early: what was found before they started from equal values.
        precision: the job's.
    """
    deciding = fp64 or usual
    left, right = deciding.left, deciding.right
    limits = _limits(fp64, precision)
    findings = [*early, *not_finite(usual.left, usual.right, precision)]
    if fp64 is not None and len(findings) == len(early):
        findings += not_finite(left, right, "fp64")
    findings += of_observations(left, right)
    is_complete = all(one.suspect != MISSING_BIAS for one in early)
    is_random = bool(left.random_layers or right.random_layers)
    found, divergence, has_settings = _of_forward(deciding, start, limits, is_random)
    if any(one.suspect == "rate" for one in found):  # of a layer that is known
        findings = [one for one in findings if one.suspect != "dropout rate"]
    findings += found
    notes = _notes(deciding, fp64)
    if not divergence and not is_random:
        of_loss = _of_losses(left, right, limits)
        findings += of_loss
        if not of_loss and not (left.is_random_in_training or right.is_random_in_training):
            steps = list(deciding.steps)
            of_gradient = of_gradients(left, right, steps, start, limits=limits)
            # a layer that is frozen may compute something else in training, as Keras's batch norm does
            findings += [] if any(one.suspect == FROZEN for one in findings) else of_gradient
            if not of_gradient and is_complete:
                of_update, more = of_updates(left, right, steps, start, limits=limits)
                findings += [one for one in of_update if not (one.suspect == MOMENTUM and has_settings)]
                notes += more
    if fp64 is not None and not findings:
        ours, others = usual.left, usual.right
        findings += of_precision(ours, others, usual.rows, limits_of(precision), precision)
    return Verdict(usual, fp64, findings, limits, divergence, notes)


def _of_forward(
    found: Comparison, start: PortableState, limits: Limits, is_random: bool
) -> tuple[list[Finding], str, bool]:
    """Return why outputs differ, where they begin to, and whether momenta of batch norm differ."""
    findings = list(different_settings(found.rows, limits.forward))
    has_momentum = any(one.suspect == MOMENTUM for _, one in findings)
    divergence = None if is_random else first_divergence(found.rows, limits.forward)
    words = ""
    if divergence is not None:
        place = found.rows.index(divergence.row)
        apart = divergence.apart
        words = (
            f"{place_of(divergence)}: {apart.relative:.1e} relative, {apart.absolute:.1e} "
            "absolute; what comes "
            "before it agrees"
        )
        is_known = any(
            one.layer == divergence.row.layer and one.suspect != MOMENTUM and not divergence.before
            for _, one in findings
        )
        if not is_known:
            findings.append((place, explain(divergence, start)))
    elif not any(row.left.channels_first for row in found.rows):  # else the other order is PyTorch's habit
        ends = [row for row in found.rows if row.layer == OUTPUTS and row.axes_differ]
        findings += [(len(found.rows), _of_axes(row)) for row in ends]
    return [one for _, one in sorted(findings, key=lambda pair: pair[0])], words, has_momentum


def _of_axes(row: Row) -> Finding:
    text = "PyTorch gives the same numbers with the axes in another order than TensorFlow"
    return Finding("layout", f"the model's outputs{row.path.removeprefix(OUTPUTS)}", text)


def _of_losses(left: Observation, right: Observation, limits: Limits) -> list[Finding]:
    """Return why the losses of samples differ though outputs do not."""
    ours, others = left.forward.losses, right.forward.losses
    if ours.shape == others.shape and difference(ours, others).relative <= limits.losses:
        return []
    text = explain_losses(ours, others, left.forward.outputs, left.targets)
    suspect = "label shift" if " compares " in text else "loss"
    apart = f"{difference(ours, others).relative:.1e}" if ours.shape == others.shape else "shape"
    return [Finding(suspect, "the loss", text or f"it differs by {apart} though the model's outputs agree")]


def _limits(fp64: Comparison | None, precision: str) -> Limits:
    if fp64 is None:
        return limits_of(precision)
    forward = PARTLY_FP32 if _narrow_layer(fp64) else FP64
    losses = [side.forward.losses.dtype for side in (fp64.left, fp64.right)]
    is_wide = all(dtype == np.float64 for dtype in losses)
    is_wide &= not (fp64.left.forward.narrow or fp64.right.forward.narrow)
    of_losses = FP64 if is_wide and forward is FP64 else PARTLY_FP32
    return Limits(forward.forward, of_losses.losses, max(forward.steps, of_losses.steps))


def _narrow_layer(found: Comparison) -> str:
    """Return the first layer that computes in fp32 in a comparison in fp64."""
    for side, title in ((found.left, "PyTorch"), (found.right, "TensorFlow")):
        if side.forward.narrow not in {"", LOSS}:
            return f"{side.forward.narrow} in {title}"
    for row in found.rows:
        for call, title in ((row.left, "PyTorch"), (row.right, "TensorFlow")):
            if call.outputs is not None and call.outputs.dtype == np.float32:
                return f"{row.path} in {title}"
    return ""


def _notes(found: Comparison, fp64: Comparison | None) -> list[str]:
    notes = []
    if fp64 is not None and (layer := _narrow_layer(fp64)):
        notes.append(
            f"{layer} computes in fp32 whatever its inputs are: differences below 1e-5 count as rounding"
        )
    if rates := sorted({*found.left.dropout_rates, *found.right.dropout_rates}):
        notes.append(
            f"dropout (rates {', '.join(f'{rate:g}' for rate in rates)}) is off in the training steps"
        )
    counts = [1 + len(side.forward.more_outputs) for side in (found.left, found.right)]
    if counts[0] != counts[1]:
        notes.append(
            f"PyTorch's model has {counts[0]} outputs, TensorFlow's {counts[1]}: the others are not compared"
        )
    ours, others = only_on_one_side(found.left.forward, found.right.forward)
    for title, layers in (("PyTorch", ours), ("TensorFlow", others)):
        if layers:
            more = f" and {len(layers) - 5} more" if len(layers) > 5 else ""
            notes.append(
                f"layers of {title} alone, compared by what they give on: {', '.join(layers[:5])}{more}"
            )
    return notes
