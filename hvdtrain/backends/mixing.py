"""The loss of mixed samples, in either framework."""

from collections.abc import Callable, Mapping
from typing import Any

from hvdtrain.backends.objective.counting import Weighted
from hvdtrain.data.mixing import SHARE, partner_of
from hvdtrain.errors import TaskError

_LEAST = 1e-30  # in place of a weight of 0


def mixed(loss: Callable[..., Any], cast: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """Return the loss of samples that mixup or CutMix made: that of both samples, by their shares.

    Args:
        loss: a function of (outputs, batch) that gives one value per sample, perhaps with weights.
        cast: returns a tensor in another type.
    """

    def of_both(outputs: Any, batch: Mapping[str, Any]) -> Any:
        if SHARE not in batch:  # samples as they are
            return loss(outputs, batch)
        own, other = loss(outputs, batch), loss(outputs, partner_of(batch))
        if not isinstance(own, Weighted):
            share = cast(batch[SHARE], own.dtype)
            return own * (1 - share) + other * share
        if not own.values.shape:
            raise TaskError(
                "mixup and cutmix mix the losses of samples; the task's loss gives the mean of a batch",
                "Give one value per sample, or mix in the task's own loss.",
            )
        share = cast(batch[SHARE], own.values.dtype)
        parts = cast(own.weights, share.dtype) * (1 - share), cast(other.weights, share.dtype) * share
        weights = parts[0] + parts[1]
        return Weighted((own.values * parts[0] + other.values * parts[1]) / (weights + _LEAST), weights)

    return of_both
