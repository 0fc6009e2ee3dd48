"""The stages of a step in PyTorch if each worker updates a part of the parameters."""

from collections.abc import Callable
from functools import partial
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.step_metrics import OVERFLOW_INDEX
from hvdtrain.backends.torch.reduction.bfloat16 import laid_out_as
from hvdtrain.backends.torch.reduction.reducer import summed_meanwhile
from hvdtrain.backends.torch.steps.sharded_parameters import (
    Bucket,
    OwnSegment,
    ShardedParameters,
    memory_of,
)
from hvdtrain.backends.torch.steps.update import Update
from hvdtrain.config import Config
from hvdtrain.errors import TaskError
from hvdtrain.host.cores import keep_freed

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


class ShardedUpdate(Update):
    """The update of a step after which every worker has the whole gradient and updates its part.

    Args:
        shards: the parameters.
        *arguments: those of ``Update``; the optimizer is one over the segments.
        **options: those of ``Update``.
    """

    def __init__(self, shards: ShardedParameters, *arguments: Any, **options: Any) -> None:
        self._shards = shards
        super().__init__(*arguments, **options)

    def zero_grad(self) -> None:
        """Drop the gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def update(self, learning_rate: float) -> None:
        """Collective. Let the optimizer update this worker's part, and gather all parts."""
        self._shards.follow()
        for bucket in self._shards.buckets:
            for segment in bucket.segments:
                segment.tensor.grad = self._gradient_of(bucket, segment)
        try:
            super().update(learning_rate)
        finally:
            for segment in self._shards.segments:
                segment.tensor.grad = None
        self._shards.gather(lambda segment: segment.tensor, "parameters")

    def _leave_out(self) -> None:
        left_out = {self._entries[place].path for place in self._left_out}
        for segment in self._shards.segments:
            if segment.entry.path in left_out:
                segment.tensor.grad = None

    def _gradient_of(self, _: Bucket, segment: OwnSegment) -> torch.Tensor:
        parameter = segment.entry.tensor
        assert parameter.grad is not None  # unused parameters have zeros
        return memory_of(_dense(parameter, parameter.grad))[segment.begin : segment.end]


class ShardedGradientsUpdate(ShardedUpdate):
    """The update of a step in which every worker gets the sum of its part of the gradients alone.

    Once a backward pass has completed the gradients of a bucket, each worker sends every other one its part
    of them and drops them. It adds up what it receives, in the order of ranks, when it sends the next bucket.

    Args:
        compression: how gradients travel: "none", "fp16" or "bf16".
        shards: the parameters.
        *arguments: those of ``Update``; the optimizer is one over the segments.
        **options: those of ``Update``.
    """

    def __init__(self, compression: str, shards: ShardedParameters, *arguments: Any, **options: Any) -> None:
        self._half = _HALVES.get(compression)
        self._hooks: list[Any] = []
        self._is_in_pass = False
        self._reached: set[str] = set()  # by the backward passes of this step
        self._missing: list[set[str]] = []  # of each bucket, what the backward pass has not completed
        self._sent: dict[int, Callable[[], None]] = {}  # waits for what a bucket receives
        self._sums: list[torch.Tensor] = []  # of each bucket, this worker's part
        super().__init__(shards, *arguments, **options)
        keep_freed()  # of dropped gradients, which the next step would take anew

    def begin(self, reduces: bool = True) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._is_in_pass = [], False
        self._sent.clear()
        self._expected = self._passes = 1
        self._lent = self._seen = ([], []) if reduces else self._look()
        if not reduces:
            return
        for bucket in self._shards.buckets:
            for entry in bucket.entries:
                hook = entry.tensor.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                    partial(self._complete, bucket, entry.path)
                )
                self._hooks.append(hook)

    def expect(self, passes: int, in_warmup: bool = False) -> None:
        """Say how many backward passes follow."""
        self._reached = set()
        self._sent.clear()
        self._sums = [bucket.zeros(bucket.layout.part) for bucket in self._shards.buckets]
        self._expected = self._passes = passes
        self._lent = self._seen = self._look()

    def backward(self, losses: torch.Tensor, gradient_weights: torch.Tensor) -> None:
        """Collective, if it belongs to a step. Add a micro-batch's part to the sums of the gradients.

        Raises:
            TaskError: If something else has changed the gradients, such as a task that calls ``backward``.
        """
        if not self._hooks:
            super().backward(losses, gradient_weights)
            return
        self._missing = [{entry.path for entry in bucket.entries} for bucket in self._shards.buckets]
        self._is_in_pass = True
        try:
            super().backward(losses, gradient_weights)
        finally:
            self._is_in_pass = False
        for bucket in self._shards.buckets:
            if self._missing[bucket.number]:  # which the pass has not reached
                self._missing[bucket.number].clear()
                self._send(bucket)
        self._lent = self._seen = self._look()

    def fill_in_unused(self) -> list[str]:
        """Return the names of the parameters that no micro-batch reached; their gradients are zero."""
        paths = [entry.path for entry in self._entries]
        self._unused = [place for place, path in enumerate(paths) if path not in self._reached]
        return [f"model/{paths[place]}" for place in self._unused]

    def reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """Collective. Wait for this worker's part of the gradients; return the sum of the step's vector."""
        self._clock.ready()
        vector = self._with_reached(vector)
        with summed_meanwhile(vector):
            for bucket in self._shards.buckets:
                self._receive(bucket)
        self._clock.reduced()
        return self._without_reached(vector)

    def unscale_or_skip(self, vector: torch.Tensor) -> bool:
        """Collective, with a loss scale. As without sharding; the workers agree on whether to skip."""
        if self.loss_scale is None:
            return True
        is_finite = self.loss_scale.unscale(self._sums, self._agreed)
        vector[OVERFLOW_INDEX] = float(self.loss_scale.is_exhausted)
        return is_finite

    def clip(self) -> None:
        """Collective, if the config has a norm. Scale the gradients so that it is their largest norm."""
        if self._clip_norm is None:
            return
        squares = torch.stack([part.to(torch.float64).square().sum() for part in self._sums]).sum().cpu()
        norm = hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.gradient_norm").sqrt()
        factor = float(torch.clamp(self._clip_norm / (norm + 1e-6), max=1.0))  # as torch.nn.utils has it
        torch._foreach_mul_(self._sums, factor)

    def update(self, learning_rate: float) -> None:
        """Collective. Let the optimizer update this worker's part, and gather all parts."""
        super().update(learning_rate)
        self._sums = []

    def _gradient_of(self, bucket: Bucket, segment: OwnSegment) -> torch.Tensor:
        return segment.in_part(self._sums[bucket.number])

    def _gradients(self) -> list[torch.Tensor]:
        return self._sums

    @staticmethod
    def _agreed(is_finite: bool) -> bool:
        lost = torch.tensor([0.0 if is_finite else 1.0])
        return not hvd.allreduce(lost, op=hvd.Sum, name="hvdtrain.overflow").item()

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
        self._reached.add(path)
        if not missing:
            self._send(bucket)

    @torch.no_grad()
    def _send(self, bucket: Bucket) -> None:
        """Begin to send the gradients of a bucket, and drop them."""
        self._receive(bucket)  # of the micro-batch before
        flat = bucket.take_gradients()
        factor, size = 1.0, self._shards.workers.size
        if self._half is not None and flat.dtype == torch.float32:
            if self._half == torch.float16 and self.loss_scale is None:
                factor = float(size)  # of parts of a mean over all workers, fp16 would lose digits
            flat = (flat.mul_(factor) if factor != 1 else flat).to(self._half).view(torch.int16)
        handle = hvd.alltoall_async(flat, name=_name_of(bucket))
        others = list(self._sent)
        self._sent[bucket.number] = partial(self._sum, handle, bucket, factor)
        for other in others:  # each takes the memory of its bucket twice
            self._receive(self._shards.buckets[other])

    def _sum(self, handle: Any, bucket: Bucket, factor: float) -> None:
        """Wait for what a bucket receives, and add it to this worker's part of the gradients."""
        received, _ = hvd.synchronize(handle)
        kind = bucket.entries[0].tensor.dtype
        if self._half is not None and received.dtype == torch.int16:
            received = received.view(self._half)
        total = self._sums[bucket.number]
        for part in received.view(self._shards.workers.size, bucket.layout.part):
            total += part.to(kind) if factor == 1 else part.to(kind).div_(factor)

    def _receive(self, bucket: Bucket) -> None:
        if (wait := self._sent.pop(bucket.number, None)) is not None:
            wait()


def _dense(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """Return a gradient that is dense and whose numbers lie in memory as the parameter's do."""
    gradient = gradient.detach()
    return laid_out_as(parameter, gradient.to_dense() if gradient.is_sparse else gradient)


def _name_of(bucket: Bucket) -> str:
    return f"hvdtrain.gradients.{bucket.number}"


def update_kind(config: Config, shards: ShardedParameters | None) -> Callable[..., Update]:
    """Return what makes the update that a config asks for, from the arguments of ``Update``.

    Args:
        config: the job's config.
        shards: the parameters; None if each worker updates all of them.
    """
    if shards is None:
        return Update
    if config.shard == "optimizer":
        return partial(ShardedUpdate, shards)
    return partial(ShardedGradientsUpdate, config.compression, shards)
