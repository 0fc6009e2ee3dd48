"""The verdict on two models: what was compared, what differs, and whether it is rounding."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hvdtrain.backends.base import PortableState
from hvdtrain.parity.differences import difference
from hvdtrain.parity.job_precision import of_precision
from hvdtrain.parity.limits import FP64, PARTLY_FP32, Limits, limits_of
from hvdtrain.parity.losses import explain_losses
from hvdtrain.tools.parity.explanation import explain, place_of
from hvdtrain.tools.parity.findings import (
    FROZEN,
    MISSING_BIAS,
    MOMENTUM,
    Finding,
    different_settings,
    not_finite,
    of_observations,
)
from hvdtrain.tools.parity.observation import LOSS, Observation
from hvdtrain.tools.parity.rows import OUTPUTS, Row, first_divergence, make_rows, only_on_one_side
from hvdtrain.tools.parity.steps import StepRow, of_gradients, of_updates, step_rows


@dataclass(frozen=True)
class Comparison:
    """Two observations side by side.

    Attributes:
        left: PyTorch's.
        right: TensorFlow's.
        rows: the layers that both call.
        steps: the training steps.
    """

    left: Observation
    right: Observation
    rows: Sequence[Row]
    steps: Sequence[StepRow]

    @classmethod
    def of(cls, left: Observation, right: Observation) -> "Comparison":
        """Compare."""
        names = left.steps[0].parameters if left.steps else ()
        rows = make_rows(left.forward, right.forward, names)
        return cls(left, right, rows, step_rows(left, right))


@dataclass(frozen=True)
class Verdict:
    """What was found.

    Attributes:
        usual: the comparison in the job's precision.
        fp64: that in fp64; None if the models cannot compute in it.
        findings: causes of differences, in the order of the computation.
        limits: what counts as rounding, in fp64 or, without it, in the job's precision.
        divergence: where the models begin to differ, in words; empty if they do not.
        notes: what else to tell the user.
    """

    usual: Comparison
    fp64: Comparison | None
    findings: Sequence[Finding]
    limits: Limits
    divergence: str = ""
    notes: Sequence[str] = field(default=())

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
