"""What makes losses differ though outputs do not: a shift of the labels, a factor."""

from collections.abc import Iterator

import numpy as np

from hvdtrain.parity.differences import Array, difference
from hvdtrain.parity.symptoms import constant_factor

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
