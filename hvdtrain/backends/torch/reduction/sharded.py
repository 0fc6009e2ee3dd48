"""Gradients of PyTorch of which each worker gets the sum of its part alone."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.torch.reduction.reducer import Reducer
from hvdtrain.backends.torch.reduction.sharded_parameters import Bucket, ShardedParameters
from hvdtrain.config.values import compression_of
from hvdtrain.errors import TaskError


class Sharded(Reducer):
    """Sums each worker's part of the gradients, one vector for each bucket of parameters.

    Once a backward pass has completed the gradients of a bucket, each worker sends every other one its part
    of them and drops them. It adds up what it receives, in the order of ranks, when it sends the next bucket.
    """

    def __init__(self, shards: ShardedParameters, compression: str, scaled: bool = False) -> None:
        super().__init__(shards.workers, scaled)
        self.reached: set[str] = set()  # paths of the parameters that backward passes of this step reached
        self._buckets = shards.buckets
        kind = compression_of(compression).parts_as
        # fp16 would lose digits of parts of a mean over all workers, unless a loss scale has multiplied them
        self._factor = shards.workers.size if kind == "float16" and not scaled else 1
        self._kind: torch.dtype = getattr(torch, kind)
        self._hooks: list[Any] = []
        self._is_in_pass = False
        self._missing: list[set[str]] = []  # of each bucket, what the backward pass has not completed
        self._sent: dict[int, Callable[[], None]] = {}  # waits for what a bucket receives
        self._sums: list[torch.Tensor] = []

    @property
    def is_attached(self) -> bool:
        """Whether backward passes belong to a step."""
        return bool(self._hooks)

    def attach(self, parameters: Mapping[str, torch.Tensor]) -> None:
        """Watch the parameters; none, if backward passes that follow belong to no step."""
        super().attach(parameters)
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._is_in_pass = [], False
        self._sent.clear()
        for bucket in self._buckets if parameters else ():
            for entry in bucket.entries:
                hook = entry.tensor.register_post_accumulate_grad_hook(
                    partial(self._complete, bucket, entry.path)
                )
                self._hooks.append(hook)

    def follow(self, in_warmup: bool = False, passes: int = 1) -> None:
        """Begin the sums of the next step. Local: no collective."""
        self.reached = set()
        self._sent.clear()
        self._sums = [torch.zeros(bucket.layout.part, **bucket.kind) for bucket in self._buckets]

    @contextmanager
    def in_pass(self) -> Iterator[None]:
        """Collective, if it belongs to a step. Return a context for a backward pass."""
        if not self._hooks:
            yield
            return
        self._missing = [{entry.path for entry in bucket.entries} for bucket in self._buckets]
        self._is_in_pass = True
        try:
            yield
        finally:
            self._is_in_pass = False
        for bucket in self._buckets:
            if self._missing[bucket.number]:  # which the pass has not reached
                self._missing[bucket.number].clear()
                self._send(bucket)

    def _sum(self, gradients: list[torch.Tensor]) -> list[torch.Tensor]:
        """Collective. Return this worker's parts of the sums, when all have come."""
        for bucket in self._buckets:
            self._receive(bucket)
        sums, self._sums = self._sums, []
        return sums

    def _complete(self, bucket: Bucket, path: str, _: torch.Tensor) -> None:
        """Take a gradient as complete; a hook of the parameter."""
        if not self._is_in_pass:
            return
        missing = self._missing[bucket.number]
        if path not in missing:
            raise TaskError(
                f"the gradient of {path} grew after it was complete",
                "A step calls backward once for each micro-batch; leave it out of the task.",
            )
        missing.remove(path)
        self.reached.add(path)
        if not missing:
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        """Begin to send the gradients of a bucket, and drop them."""
        self._receive(bucket)  # of the micro-batch before
        flat, factor = bucket.take_gradients(), 1
        if flat.dtype == torch.float32 and self._kind != torch.float32:
            factor = self._factor
            flat = (flat.mul_(factor) if factor != 1 else flat).to(self._kind).view(torch.int16)
        handle = hvd.alltoall_async(flat, name=f"hvdtrain.gradients.{bucket.number}")
        others = list(self._sent)
        self._sent[bucket.number] = partial(self._add, handle, bucket, factor)
        for other in others:  # each takes the memory of its bucket twice
            self._receive(self._buckets[other])

    def _add(self, handle: Any, bucket: Bucket, factor: int) -> None:
        """Wait for what a bucket receives, and add it to this worker's part of the gradients."""
        received, _ = hvd.synchronize(handle)
        kind = bucket.kind["dtype"]
        if received.dtype == torch.int16:
            received = received.view(self._kind)
        total = self._sums[bucket.number]
        for part in received.view(self._workers.size, bucket.layout.part):
            total += part.to(kind) if factor == 1 else part.to(kind).div_(factor)

    def _receive(self, bucket: Bucket) -> None:
        if (wait := self._sent.pop(bucket.number, None)) is not None:
            wait()
