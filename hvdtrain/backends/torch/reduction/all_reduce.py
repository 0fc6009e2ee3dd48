"""How PyTorch's gradients are summed over workers by all-reduces of flat tensors."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch import mpi_ops
from torch import Tensor

from hvdtrain.backends.reduction import GradientReducer, meanwhile, no_bf16
from hvdtrain.backends.torch.reduction.broadcast import Wait, wait_for_all
from hvdtrain.backends.torch.reduction.flat import Bucket, make_buckets
from hvdtrain.backends.torch.state.model_state import Entry
from hvdtrain.backends.workers import Sized, group_of
from hvdtrain.config import Config
from hvdtrain.config.values import compression_of
from hvdtrain.errors import ConfigError, TaskError

_ORDINARY = (torch.float32, torch.float64, torch.float16)


class Reducer(GradientReducer):
    """A reducer of PyTorch; see ``GradientReducer``."""

    def finish(self, gradients: list[Tensor], vector: Tensor | None = None) -> tuple[list[Tensor], Any]:
        """Collective. Return the sum of each gradient over workers; sum a vector in place, by itself."""
        if self._workers.size == 1:
            return list(gradients), vector
        if vector is None:
            return self._sum(gradients), None
        with summed_meanwhile(vector):
            return self._sum(gradients), vector


@contextmanager
def summed_meanwhile(vector: Tensor) -> Iterator[None]:
    """Collective. Return a context at whose end a vector is summed in place, by a message of its own."""
    handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
    try:
        yield
    finally:
        hvd.synchronize(handle)


def check_kinds(trainable: Iterable[Entry], config: Config) -> None:
    """Check that what a config requests can be computed with the kinds of numbers that the parameters are."""
    options = {
        f"shard: {config.shard}": config.shard != "none",
        f"compression: {config.compression}": bool(compression_of(config.compression).keeps),
        f"optimizer: {config.optimizer}": config.optimizer in ("lars", "lamb"),
    }
    option = next((name for name, is_given in options.items() if is_given), None)
    entry = next((entry for entry in trainable if entry.tensor.dtype not in _ORDINARY), None)
    if option is not None and entry is not None:
        kind = str(entry.tensor.dtype).removeprefix("torch.")
        raise ConfigError(
            f"{option}: the model's parameter {entry.path} is {kind}; this takes real numbers in fp32, fp64 "
            "or fp16",
            "Leave the option out, or convert the model: model.float().",
        )


def sum_sparse(gradient: Tensor, name: str, group: Mapping[str, Any]) -> Callable[[], Tensor]:
    """Collective. Begin to gather the rows of a sparse gradient; return what waits for the sum."""
    shape, indices, values = gradient.shape, gradient._indices().t(), gradient._values()
    if not len(values):  # one at the index -1 is left out, and no message is empty
        indices = indices.new_full((1, indices.shape[1]), -1)
        values = values.new_zeros((1, *values.shape[1:]))
    of_indices = hvd.allgather_async(indices.contiguous(), name=f"{name}.indices", **group)
    of_values = hvd.allgather_async(values.contiguous(), name=f"{name}.values", **group)

    def wait() -> Tensor:
        try:
            places = hvd.synchronize(of_indices)
        finally:  # also after a failure: Horovod keeps what nobody waited for
            rows = hvd.synchronize(of_values)
        is_row = places[:, 0] >= 0
        return torch.sparse_coo_tensor(places[is_row].t(), rows[is_row], shape, check_invariants=False)

    return wait


class AllReduce(Reducer):
    """All-reduces of the gradients of one type, which stand side by side in memory: one for about 32 MiB."""

    # in which order is added depends on nothing but parameters and workers, so that a run repeats bit by bit

    overwrites = False
    carries = True  # whether a step's vector travels with the gradients, if one has its type
    sent_as = "uncompressed"

    def __init__(self, workers: Sized, scaled: bool = False) -> None:
        super().__init__(workers, scaled)
        self._group = group_of(workers)
        self._hooks: list[Any] = []
        self._buckets: list[Bucket] | None = None  # None until the first gradients show which are sparse
        self._vector: Tensor | None = None
        self._carrier: int | None = None  # number of the bucket with which a vector travels
        self._left: dict[str, int] = {}  # backward passes until a gradient is complete; empty between steps
        self._incomplete: list[int] = []  # gradients of each bucket that are not complete
        self._begun: dict[int, Wait] = {}  # by the number of the bucket

    def attach(self, parameters: Mapping[str, Tensor]) -> None:
        """Forget the memory of gradients, too: what was begun may still write to it."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._buckets, self._carrier = [], None, None
        super().attach(parameters if self._workers.size > 1 else {})
        self._forget()

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Lend memory to the gradients of the next step. Local: no collective."""
        self._forget()
        if self._hooks:
            self._left = dict.fromkeys(self._parameters, passes)
        for bucket in self._buckets or ():
            bucket.lend()

    def start(self, gradients: Sequence[Tensor]) -> None:
        """Begin what no backward pass has completed, from the second step on. Local: no collective."""
        if self._buckets is not None:
            self._start(dict(zip(self._parameters, gradients, strict=True)))

    def finish(self, gradients: list[Tensor], vector: Tensor | None = None) -> tuple[list[Tensor], Any]:
        """Collective. Begin what no backward pass has completed, and wait for all. Empty the list."""
        if self._workers.size > 1 and self.carries and vector is not None:
            return self._sum(gradients, vector), vector
        return super().finish(gradients, vector)

    def describe(self) -> str:
        """Return how gradients travel, for the plan."""
        parts = len(make_buckets(self._parameters, True)) if self._begins_early(self._parameters) else 0
        return f"fp32, sent {self.sent_as}{meanwhile(parts)}"

    def _begins_early(self, parameters: Mapping[str, Tensor]) -> bool:
        size = sum(parameter.nbytes for parameter in parameters.values())
        return self.begins_early(size, any(parameter.is_cuda for parameter in parameters.values()))

    def _cast_for(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        """Return the type in which real numbers travel, and what they are multiplied by before that."""
        return torch.float32 if dtype is torch.bfloat16 else dtype, 1

    def _start(self, given: dict[str, Tensor]) -> None:
        """Begin as ``start``; take what is begun out of the mapping, so that its memory can be freed."""
        for number, bucket in enumerate(self._buckets or ()):
            if number not in self._begun:
                self._begin(number, [given.pop(name) for name in bucket.parameters])

    def _sum(self, gradients: list[Tensor], vector: Tensor | None = None) -> list[Tensor]:
        """Collective. Return the sums of gradients, and sum a vector in place."""
        given = dict(zip(self._parameters, gradients, strict=True))
        gradients.clear()
        try:
            if self._buckets is None:
                self._make_buckets({name for name, one in given.items() if one.is_sparse}, vector)
            assert self._buckets is not None
            self._vector = vector
            self._start(given)
            sums: dict[str, Tensor] = {}
            for bucket in self._buckets:
                sums |= dict(zip(bucket.parameters, bucket.parts, strict=True))
            rest = [(name, gradient) for name, gradient in given.items() if name not in sums]
            alone = {name: sum_sparse(g, f"hvdtrain.gradient.{name}", self._group) for name, g in rest}
            waits = [*self._begun.values(), *alone.values()]
            if vector is not None and self._carrier is None:
                handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
                waits.append(partial(hvd.synchronize, handle))
            found = wait_for_all(waits)
            if vector is not None and self._carrier is not None:
                vector.copy_(self._buckets[self._carrier].room)
            sums |= dict(zip(alone, found[len(self._begun) :], strict=False))
            return [sums[name] for name in self._parameters]
        finally:
            self._forget()

    def _make_buckets(self, sparse: set[str], vector: Tensor | None) -> None:
        """Make the buckets; the last one of the vector's type carries it, since it is begun last."""
        dense = {name: parameter for name, parameter in self._parameters.items() if name not in sparse}
        overlaps = self._begins_early(dense)
        self._buckets = make_buckets(dense, overlaps)
        if vector is not None:
            kind = vector.dtype, vector.device
            carriers = [n for n, b in enumerate(self._buckets) if (b.flat.dtype, b.flat.device) == kind]
            self._carrier = carriers[-1] if carriers else None
        if overlaps:
            self._hooks = [
                p.register_post_accumulate_grad_hook(partial(self._count, number, name))  # type: ignore[no-untyped-call]
                for number, bucket in enumerate(self._buckets)
                for name, p in bucket.parameters.items()
            ]
        self._forget()

    def _count(self, number: int, name: str, _: Tensor) -> None:
        if name not in self._left:  # not of a step, but of a callback
            return
        if self._left[name] == 0:
            raise TaskError(
                f"the gradient of {name} grew after its last backward pass",
                "A step calls backward once for each micro-batch; leave it out of the task. If parts of the "
                "model have backward passes of their own, as reentrant checkpoints do, use --overlap false.",
            )
        self._left[name] -= 1
        if self._left[name] == 0:
            self._incomplete[number] -= 1
            if self._incomplete[number] == 0 and number != self._carrier:
                assert self._buckets is not None
                self._begin(number, [p.grad for p in self._buckets[number].parameters.values()])

    def _begin(self, number: int, gradients: Sequence[Tensor | None]) -> None:
        assert self._buckets is not None
        bucket = self._buckets[number]
        vector = self._vector if number == self._carrier else None
        if vector is not None:
            bucket.make_room(len(vector))
        bucket.take_in(gradients)
        if vector is not None:
            bucket.room.copy_(vector)
        name = f"hvdtrain.gradients.{next(iter(self._parameters))}.{number}"
        numbers = bucket.numbers
        kind, factor = self._cast_for(numbers.dtype)
        if kind is numbers.dtype and factor == 1:
            handle = hvd.allreduce_async_(numbers, op=hvd.Sum, name=name, **self._group)
            self._begun[number] = partial(hvd.synchronize, handle)
            return
        sent = bucket.cast(kind, factor)
        handle = hvd.allreduce_async_(sent, op=hvd.Sum, postscale_factor=1 / factor, name=name, **self._group)
        self._begun[number] = lambda: numbers.copy_(hvd.synchronize(handle))

    def _forget(self) -> None:
        self._begun.clear()
        self._vector = None
        self._left = {}
        self._incomplete = [len(bucket.parameters) for bucket in self._buckets or ()]


class Fp16(AllReduce):
    """All-reduces of gradients as fp16, which has few digits below 6e-5: parts of a mean are multiplied."""

    carries = False
    sent_as = "as fp16"

    def _cast_for(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        return torch.float16, 1 if self._scaled else self._workers.size


class BFloat16(AllReduce):
    """All-reduces of gradients of fp32 as bf16, in which each addition is rounded."""

    carries = False
    sent_as = "as bf16"

    def attach(self, parameters: Mapping[str, Tensor]) -> None:
        """Take the parameters; refuse them if the installed Horovod sums no bf16 where they are."""
        super().attach(parameters)
        for parameter in self._parameters.values():
            kind = torch.empty(0, dtype=torch.bfloat16, device=parameter.device).type().replace(".", "_")
            if not hasattr(mpi_ops.mpi_lib, f"horovod_torch_allreduce_async_{kind}"):
                raise no_bf16()

    def _cast_for(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        return torch.bfloat16 if dtype is torch.float32 else dtype, 1
