"""What counts in a loss or metric, and how much: ignored targets, weights of samples, targets and classes."""

import math
import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from hvdtrain.errors import TaskError


class Weighted(NamedTuple):
    """Values that count with weights: what a loss or metric may return in place of one value per sample.

    The result of a step is sum(weights * values) / sum(weights), over all samples of all workers. Both
    have the shape (samples,); or both are single numbers: the mean of a batch, and what it is a mean over,
    such as the number of its rows or tokens. No gradient flows through weights.

    Attributes:
        values: the values; the loss is differentiated through them.
        weights: their weights, finite and not negative.
    """

    values: Any
    weights: Any


IGNORE_INDEX = -100  # as in PyTorch


@dataclass(frozen=True)
class Counting:
    """Which targets a named loss or metric counts, and how much."""

    ignore_index: int = IGNORE_INDEX  # the target that does not count
    # whether it is looked for if a sample has one target, too, and not only if it has several
    of_samples: bool = False
    class_weights: tuple[float, ...] | None = None
    batch_weights: bool = False


OF_METRICS = Counting()


def counting_of(task: Any, loss: Any) -> Counting:
    """Return what the task says of the targets that its loss counts.

    To look for ignored targets among one per sample costs a tenth of a small model's step. It is done if the
    task has ``ignore_index``, or another loss, which may ignore some. Otherwise cross_entropy refuses them.
    """
    ignored = getattr(task, "ignore_index", IGNORE_INDEX)
    of_samples = hasattr(task, "ignore_index") or loss != "cross_entropy"
    if not isinstance(ignored, numbers.Integral) or isinstance(ignored, bool):
        raise TaskError(
            f"the task's ignore_index must be a class number that does not count, found {ignored!r}",
            f"Give an integer, or leave it out: the default is {IGNORE_INDEX}.",
        )
    given = getattr(task, "class_weights", None)
    if given is None:
        return Counting(int(ignored), of_samples, batch_weights=True)
    if loss != "cross_entropy":
        found = "a function of its own" if callable(loss) else loss
        raise TaskError(
            f"class_weights acts on the named loss cross_entropy; the task's loss is {found}",
            "Leave class_weights out, or return hvdtrain.Weighted(losses, weights) from the task's loss.",
        )
    return Counting(int(ignored), of_samples, _class_weights(given), batch_weights=True)


def _class_weights(given: Any) -> tuple[float, ...]:
    """Return the weights of the classes, with a mean of 1: only their ratios matter."""
    try:
        found = tuple(float(weight) for weight in given)
    except (TypeError, ValueError):
        found = ()
    is_right = not isinstance(given, Mapping | str) and all(0 <= w < math.inf for w in found)
    if not is_right or not sum(found):
        raise TaskError(
            f"the task's class_weights must be numbers of at least 0, one for each class; found {given!r}",
            "Give a list of finite numbers, such as [1.0, 4.0], of which at least one is not 0.",
        )
    return tuple(weight * len(found) / sum(found) for weight in found)


def sample_values(names: Sequence[str], weighted: Sequence[str], rows: Any, weights: Any) -> dict[str, Any]:
    """Return name to array (samples,), whose plain mean over the samples is the mean over what counts."""
    found = dict(zip(names, rows, strict=False))
    for name, own in zip(weighted, rows[len(names) :], strict=True):
        found[name] = found[name] / ((weights * own).sum() / (weights.sum() or 1.0) or 1.0)
    return found
