"""What workers compare of their calls in an own step, in PyTorch."""

from collections.abc import Callable, Sequence

import horovod.torch as hvd
import torch

from hvdtrain.backends.step_calls import CallsBase
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers


class Calls(CallsBase[Callable[[], None]]):
    """The calls of a step; what they return waits for a check, and raises its error.

    Args:
        names: the optimizers.
        workers: the job's workers.
    """

    def __init__(self, names: Sequence[str], workers: Workers) -> None:
        super().__init__(names)
        self._workers = workers

    def _compare(
        self, name: str, number: int, codes: list[float], different_form: TaskError
    ) -> Callable[[], None]:
        if self._workers.size == 1:
            return lambda: None
        own = torch.tensor(codes, dtype=torch.float64)
        handle = hvd.allreduce_async(own, op=hvd.Sum, name=f"hvdtrain.own_step.{number}")

        def check() -> None:
            is_equal = torch.eq(hvd.synchronize(handle), own * self._workers.size).tolist()
            if not all(is_equal[:2]):
                raise self._different_call(name, number)
            if not all(is_equal):
                raise different_form

        return check
