"""What differs in the job's precision though it does not in fp64."""

from collections.abc import Sequence

import numpy as np

from hvdtrain.backends.base import PortableState
from hvdtrain.parity.differences import Array, difference
from hvdtrain.parity.limits import Limits
from hvdtrain.tools.parity.explanation import place_of
from hvdtrain.tools.parity.findings import Finding
from hvdtrain.tools.parity.observation import Observation
from hvdtrain.tools.parity.rows import OUTPUTS, Row, first_divergence

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
