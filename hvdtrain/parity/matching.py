"""Whether two models have the same parameters, and what they start from."""

from collections.abc import Sequence
from dataclasses import dataclass

from hvdtrain.backends.base import PortableState
from hvdtrain.backends.portable.names import check_state
from hvdtrain.errors import TaskError
from hvdtrain.tools.parity.findings import MISSING_BIAS, Finding, different_beginnings, different_values

_BIASES = ("bias", "beta")


@dataclass(frozen=True)
class Unmatched:
    """A parameter that the other framework does not have in this form.

    Attributes:
        name: its portable name.
        left: its shape in PyTorch; None if it is not there.
        right: the same in TensorFlow.
    """

    name: str
    left: tuple[int, ...] | None
    right: tuple[int, ...] | None

    @property
    def is_missing_bias(self) -> bool:
        """Whether only one framework has it, and it is a bias, without which the rest can be compared."""
        return (self.left is None) != (self.right is None) and self.name.rpartition("/")[2] in _BIASES


@dataclass(frozen=True)
class Match:
    """How the parameters of two models fit together.

    Attributes:
        start: the values that both start from: PyTorch's, of what both have.
        unmatched: what does not fit.
        findings: what differs and can be compared with all the same.
        remedy: how to make the names fit, if that is known.
    """

    start: PortableState
    unmatched: Sequence[Unmatched]
    findings: Sequence[Finding]
    remedy: str = ""

    @property
    def can_compare(self) -> bool:
        """Whether the models can be compared."""
        return all(one.is_missing_bias for one in self.unmatched)


def match(left: PortableState, right: PortableState, own: Sequence[PortableState] = ()) -> Match:
    """Return how the parameters of PyTorch's model and of TensorFlow's fit together.

    Args:
        left: PyTorch's initial values.
        right: TensorFlow's.
        own: the values of both that their own initializers give, if these are to be compared.
    """
    unmatched = []
    for name in [*left, *(name for name in right if name not in left)]:
        shapes = [tuple(side[name].shape) if name in side else None for side in (left, right)]
        if shapes[0] != shapes[1]:
            unmatched.append(Unmatched(name.removeprefix("model/"), *shapes))
    start = {name: left[name] for name in left if name in right and left[name].shape == right[name].shape}
    if not all(one.is_missing_bias for one in unmatched):
        return Match(start, unmatched, [], _remedy(left, right))
    findings = [
        Finding(
            MISSING_BIAS,
            one.name.rpartition("/")[0],
            f"{'TensorFlow' if one.right is None else 'PyTorch'} has no {one.name}, "
            f"{'PyTorch' if one.right is None else 'TensorFlow'} has it: give both a bias, or neither",
        )
        for one in unmatched
    ]
    begin = list(different_beginnings(*own)) if own else []
    return Match(start, unmatched, [*findings, *begin, *_together(list(different_values(left, right)))])


def _together(findings: list[Finding]) -> list[Finding]:
    """Return one finding for initial values, of the first layer that differs."""
    if len(findings) < 2:
        return findings
    first = findings[0]
    text = (
        f"{first.text}; so do {len(findings) - 1} others. For equal values: initial_parameters: "
        "portable, or --init"
    )
    return [Finding(first.suspect, first.layer, text)]


def _remedy(left: PortableState, right: PortableState) -> str:
    """Return a line of ``state_names`` that makes the names fit; empty if there is none."""
    try:
        check_state({name: tuple(array.shape) for name, array in left.items()}, right, "torch")
    except TaskError as error:
        return error.remedy
    return ""
