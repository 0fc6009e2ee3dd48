"""Relative differences that count as rounding."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """The largest relative differences that count as rounding.

    Attributes:
        forward: of outputs.
        losses: of losses and gradients.
        steps: of parameters after steps.
    """

    forward: float
    losses: float
    steps: float


# In fp64, TensorFlow's GELU by tanh has a constant of 24 bits, and so have a step's rate and betas; and Adam
# makes much of small gradients.
FP64 = Limits(2e-8, 1e-7, 1e-4)
PARTLY_FP32 = Limits(1e-5, 1e-5, 1e-3)
FP32 = Limits(1e-4, 1e-3, 1e-2)
HALF = Limits(5e-2, 1e-1, 1e-1)


def limits_of(precision: str) -> Limits:
    """Return the limits of a job's precision."""
    return FP32 if precision == "fp32" else HALF
