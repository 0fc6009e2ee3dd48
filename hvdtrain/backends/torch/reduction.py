"""How PyTorch's gradients are summed over workers: one class for each way, chosen from a table."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import horovod.torch as hvd
import torch

from hvdtrain.agreement import Workers
from hvdtrain.backends.base import PortableState
from hvdtrain.backends.portable.low_rank import has_warmup
from hvdtrain.backends.torch.bfloat16 import BFloat16
from hvdtrain.backends.torch.flat import Bucket, make_buckets
from hvdtrain.backends.torch.low_rank import LowRank
from hvdtrain.backends.torch.model_state import Field
from hvdtrain.backends.torch.precision import LossScale
from hvdtrain.compression import rank_of
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
        """Say how many backward passes complete the gradients of the next step. Local: no collective.

        Called before each step, while no parameter has a gradient: the reducer may give them some of its own.
        """
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
    """One all-reduce for all gradients of one type, which stand side by side in memory.

    On a GPU there are up to four: those whose gradients are complete are begun while the backward pass
    computes the others. What is added in which order depends on nothing but the parameters and the workers,
    so a run repeats bit by bit. Sparse gradients, which the first step shows, are reduced one by one.

    With fp16, each gradient is multiplied by the number of workers before it is cast, and the sum is
    divided by it: gradients are parts of the mean over all workers, which get smaller as workers are
    added, and fp16 has few digits below 6e-5. For powers of two this changes nothing else. A loss scale
    has multiplied them already.

    Args:
        workers: the job's workers.
        scaled: whether a loss scale has multiplied the gradients by the number of workers.
        fp16: whether floating-point gradients travel as fp16.
        overlaps: whether reductions begin during the backward pass, the same on all workers; None: on a GPU.
    """

    def __init__(
        self, workers: Workers, scaled: bool = False, *, fp16: bool = False, overlaps: bool | None = None
    ) -> None:
        self._workers = workers
        self._passes = 1
        self._fp16 = fp16
        self._scaled = scaled
        self._overlaps = overlaps
        self._parameters: dict[str, torch.Tensor] = {}
        self._hooks: list[Any] = []
        self._buckets: list[Bucket] | None = None  # None until a step has shown which gradients are sparse
        self._left: dict[str, int] = {}  # backward passes until a gradient is complete
        self._incomplete: list[int] = []  # gradients of each bucket that are not complete
        self._begun: dict[int, Wait] = {}  # by the number of the bucket

    def attach(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Forget the memory of gradients, too: what was begun may still write to it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets = [], None
        self._parameters = dict(parameters) if self._workers.size > 1 else {}
        self._forget()

    def expect(self, passes: int) -> None:
        """Lend memory to the gradients of the next step, which that many backward passes complete."""
        self._passes = passes
        self._forget()
        for bucket in self._buckets or ():
            bucket.lend()

    def start(self, gradients: Sequence[torch.Tensor]) -> None:
        """Begin what no backward pass has completed; ``finish`` does it, too. Local: no collective."""
        given = dict(zip(self._parameters, gradients, strict=True))
        if self._buckets is None:
            self._make_buckets({name for name, gradient in given.items() if gradient.is_sparse})
        for number, bucket in enumerate(self._buckets or ()):
            if number not in self._begun:
                self._begin(number, [given[name] for name in bucket.parameters])

    def finish(self, gradients: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Begin what no backward pass has completed, and wait for all.

        The sums are parts of the memory that is lent to the gradients of the next step.
        """
        if self._workers.size == 1:
            return list(gradients)
        try:
            self.start(gradients)
            sums: dict[str, torch.Tensor] = {}
            for bucket in self._buckets or ():
                sums |= dict(zip(bucket.parameters, bucket.parts, strict=True))
            given = zip(self._parameters, gradients, strict=True)
            alone = {name: self._begin_alone(name, one) for name, one in given if name not in sums}
            found = _wait_for_all([*self._begun.values(), *alone.values()])
            sums |= dict(zip(alone, found[len(self._begun) :], strict=True))
            return [sums[name] for name in self._parameters]
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

    def _make_buckets(self, sparse: set[str]) -> None:
        dense = {name: parameter for name, parameter in self._parameters.items() if name not in sparse}
        overlaps = self._overlaps
        if overlaps is None:
            overlaps = any(parameter.is_cuda for parameter in dense.values())
        self._buckets = make_buckets(dense, overlaps)
        self._forget()
        if overlaps:
            self._hooks = [
                parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._count, number, name)
                )
                for number, bucket in enumerate(self._buckets)
                for name, parameter in bucket.parameters.items()
            ]

    def _count(self, number: int, name: str, _: torch.Tensor) -> None:
        if number in self._begun:
            raise TaskError(
                f"the gradient of {name} grew after its last backward pass",
                "A step calls backward once for each micro-batch; leave it out of the task.",
            )
        self._left[name] -= 1
        if self._left[name] == 0:
            self._incomplete[number] -= 1
            if self._incomplete[number] == 0:
                assert self._buckets is not None
                gradients = [parameter.grad for parameter in self._buckets[number].parameters.values()]
                self._begin(number, [gradient for gradient in gradients if gradient is not None])

    def _begin(self, number: int, gradients: Sequence[torch.Tensor]) -> None:
        assert self._buckets is not None
        bucket = self._buckets[number]
        bucket.take_in(gradients)
        name = f"hvdtrain.gradients.{next(iter(self._parameters))}.{number}"
        flat = bucket.flat
        if not (self._fp16 and flat.is_floating_point()):
            handle = hvd.allreduce_async_(flat, op=hvd.Sum, name=name)
            self._begun[number] = partial(hvd.synchronize, handle)
            return
        factor = 1 if self._scaled else self._workers.size
        small = bucket.as_fp16(factor)
        handle = hvd.allreduce_async_(small, op=hvd.Sum, postscale_factor=1 / factor, name=name)
        self._begun[number] = lambda: flat.copy_(hvd.synchronize(handle))

    def _begin_alone(self, name: str, gradient: torch.Tensor) -> Wait:
        """Begin the all-reduce of a gradient that is in no bucket: it was sparse in the first step."""
        name = f"hvdtrain.gradient.{name}"
        if gradient.is_sparse:
            wait: Wait = hvd.sparse_allreduce_async(gradient, name=name, op=hvd.Sum)
            return wait
        return partial(hvd.synchronize, hvd.allreduce_async_(gradient, op=hvd.Sum, name=name))

    def _forget(self) -> None:
        self._begun.clear()
        self._left = dict.fromkeys(self._parameters, self._passes)
        self._incomplete = [len(bucket.parameters) for bucket in self._buckets or ()]


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
    "bf16": BFloat16,
}


def choose_reducer(
    config: Config, workers: Workers, fields: Iterable[Field] = (), loss_scale: LossScale | None = None
) -> GradientReducer:
    """Return the reducer that a config asks for.

    Args:
        config: the job's config; its ``compression`` and ``precision`` are used.
        workers: the job's workers.
        fields: the trainable parameters as portable arrays, of which low rank needs the layout.
        loss_scale: what multiplies the gradients, if something does.
    """
    rank = rank_of(config.compression)
    if rank is None:
        return REDUCERS[config.compression](workers, config.precision == "fp16")
    factor = (lambda: 1.0) if loss_scale is None else (lambda: loss_scale.factor)
    return LowRank(workers, fields, rank, config.seed, factor=factor, has_warmup=has_warmup(config))
