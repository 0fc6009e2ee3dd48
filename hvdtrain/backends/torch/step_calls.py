"""What workers compare of their calls in an own step, in PyTorch."""

from collections.abc import Callable, Sequence

import horovod.torch as hvd
import torch

from hvdtrain.backends.own_step import (
    different_calls,
    different_metrics,
    different_weighting,
    metrics_code,
)
from hvdtrain.errors import TaskError


class Calls:
    """Checks that all workers make the same calls in a step, with an all-reduce of four numbers for each.

    If they did not, each would wait for sums that others do not compute.

    Args:
        names: the optimizers.
        size: number of workers.
    """

    def __init__(self, names: Sequence[str], size: int) -> None:
        self._codes = {"": 0.0} | {name: 1.0 + place for place, name in enumerate(names)}
        self._size = size
        self._number = 0

    def begin(self) -> None:
        """Begin a step. Local: no collective."""
        self._number = 0

    def announce(self, name: str, is_weighted: bool) -> Callable[[], None]:
        """Collective. Begin the check of a call, and return what waits for it.

        Args:
            name: the optimizer whose gradients are about to be reduced.
            is_weighted: whether its losses have weights of their own, which are then summed as well.

        Raises:
            TaskError: when waiting, on all workers, if their calls differ.
        """
        return self._announce(name, float(is_weighted), different_weighting(name, self._number))

    def announce_end(self, names: Sequence[str], weighted: Sequence[str]) -> Callable[[], None]:
        """Collective. Begin the check of the end of a step, and return what waits for it.

        Args:
            names: "loss" and the metrics that the step returned, which are summed by position.
            weighted: those of them that are Weighted.

        Raises:
            TaskError: when waiting, on all workers, if another made a call or returned other metrics.
        """
        return self._announce("", metrics_code(names, weighted), different_metrics(names, weighted))

    def _announce(self, name: str, form: float, different_form: TaskError) -> Callable[[], None]:
        number, code = self._number, self._codes[name]
        self._number += 1
        if self._size == 1:
            return lambda: None
        own = torch.tensor([code, code * code, form, form * form], dtype=torch.float64)
        handle = hvd.allreduce_async(own, op=hvd.Sum, name=f"hvdtrain.own_step.{number}")

        def check() -> None:
            # the mean and the mean square are this worker's only if all codes are equal
            is_equal = torch.eq(hvd.synchronize(handle), own * self._size).tolist()
            if not all(is_equal[:2]):
                raise different_calls(f"gradients() of {name!r}" if name else "the end", number)
            if not all(is_equal):
                raise different_form

        return check
