"""How PyTorch's gradients are summed over workers: one class for each way, chosen from a table."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import horovod.torch as hvd
import torch

from hvdtrain.agreement import Workers
from hvdtrain.backends.base import PortableState
from hvdtrain.config import Config
from hvdtrain.errors import TaskError

# waits for one all-reduce and returns the sum
Wait = Callable[[], torch.Tensor]


class GradientReducer(Protocol):
    """Sums gradients over workers. Each gradient is this worker's part of the mean already."""

    def attach(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Watch the parameters, by name, whose gradients will be reduced. Local: no collective.

        Called again, it forgets whatever a step that failed has begun.
        """
        ...

    def expect(self, passes: int) -> None:
        """Say how many backward passes complete the gradients of the next step. Local: no collective."""
        ...

    def finish(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return the sum of each gradient over workers; the tensors given may be overwritten.

        Args:
            gradients: one for each attached parameter, in the same order.
        """
        ...

    def state(self) -> PortableState:
        """Return what the reducer keeps from step to step, such as error feedback; may differ by rank."""
        ...

    def load(self, state: PortableState) -> None:
        """Restore what ``state`` returned."""
        ...

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        ...


class AllReduce:
    """One all-reduce for each parameter, begun while the backward pass still computes the others.

    With fp16, each gradient is multiplied by the number of workers before it is cast, and the sum is
    divided by it: gradients are parts of the mean over all workers, which get smaller as workers are
    added, and fp16 has few digits below 6e-5. For powers of two this changes nothing else. A loss scale
    has multiplied them already.

    Args:
        workers: the job's workers.
        scaled: whether a loss scale has multiplied the gradients by the number of workers.
        fp16: whether floating-point gradients travel as fp16.
    """

    def __init__(self, workers: Workers, scaled: bool = False, *, fp16: bool = False) -> None:
        self._workers = workers
        self._passes = 1
        self._fp16 = fp16
        self._scaled = scaled
        self._parameters: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._left: dict[str, int] = {}  # backward passes until a gradient is complete
        self._begun: dict[str, Wait] = {}

    def attach(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin an all-reduce whenever the last backward pass has completed a gradient."""
        for hook in self._hooks:
            hook.remove()
        self._parameters = dict(parameters) if self._workers.size > 1 else {}
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                partial(self._count, name)
            )
            for name, parameter in self._parameters.items()
        ]
        self._forget()

    def expect(self, passes: int) -> None:
        """Begin an all-reduce when that many backward passes have added to a gradient; 1 until it is said."""
        if passes != self._passes:
            self._passes = passes
            self._forget()

    def start(self, gradients: Sequence[torch.Tensor]) -> None:
        """Begin what no backward pass has completed; ``finish`` does it, too. Local: no collective."""
        for name, gradient in zip(self._parameters, gradients, strict=True):
            if name not in self._begun:
                self._begun[name] = self._begin(name, gradient)

    def finish(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Begin what no backward pass has completed, and wait for all."""
        if self._workers.size == 1:
            return list(gradients)
        try:
            self.start(gradients)
            return _wait_for_all([self._begun[name] for name in self._parameters])
        finally:
            self._forget()

    def state(self) -> PortableState:
        """Return nothing: a sum keeps nothing from step to step."""
        return {}

    def load(self, state: PortableState) -> None:
        """Restore nothing."""

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        return "fp32, sent " + ("as fp16" if self._fp16 else "uncompressed")

    def _count(self, name: str, parameter: torch.Tensor) -> None:
        if name in self._begun:
            raise TaskError(
                f"the gradient of {name} grew after its last backward pass",
                "A step calls backward once for each micro-batch; leave it out of the task.",
            )
        self._left[name] -= 1
        if self._left[name] == 0:
            assert parameter.grad is not None  # the hook is called when there is one
            self._begun[name] = self._begin(name, parameter.grad)

    def _begin(self, name: str, gradient: torch.Tensor) -> Wait:
        name = f"hvdtrain.gradient.{name}"
        factor = 1 if self._scaled else self._workers.size
        if gradient.is_sparse:
            wait: Wait = hvd.sparse_allreduce_async(gradient, name=name, op=hvd.Sum)
            return wait
        if not (self._fp16 and gradient.is_floating_point()):
            return partial(hvd.synchronize, hvd.allreduce_async_(gradient, op=hvd.Sum, name=name))
        small = (gradient * factor).to(torch.float16)
        handle = hvd.allreduce_async_(small, op=hvd.Sum, postscale_factor=1 / factor, name=name)
        return lambda: hvd.synchronize(handle).to(gradient.dtype)

    def _forget(self) -> None:
        self._begun.clear()
        self._left = dict.fromkeys(self._parameters, self._passes)


def _wait_for_all(waits: Sequence[Wait]) -> list[torch.Tensor]:
    """Wait for every all-reduce, also after one has failed: Horovod keeps what nobody waited for."""
    sums, failure = [], None
    for wait in waits:
        try:
            sums.append(wait())
        except Exception as error:  # Horovod's own, by any name
            failure = failure or error
    if failure is not None:
        raise failure
    return sums


# by the config's compression: the workers, whether a loss scale has multiplied the gradients by their number
# -> the reducer
REDUCERS: dict[str, Callable[[Workers, bool], GradientReducer]] = {
    "none": AllReduce,
    "fp16": partial(AllReduce, fp16=True),
}


def choose_reducer(config: Config, workers: Workers) -> GradientReducer:
    """Return the reducer that a config asks for.

    Args:
        config: the job's config; its ``compression`` and ``precision`` are used.
        workers: the job's workers.
    """
    return REDUCERS[config.compression](workers, config.precision == "fp16")
