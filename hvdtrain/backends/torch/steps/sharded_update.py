"""The stages of a step in PyTorch if each worker updates a part of the parameters."""

import horovod.torch as hvd
import torch

from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.reduction.shards import OwnSegment
from hvdtrain.backends.torch.reduction.flat import laid_out_as
from hvdtrain.backends.torch.reduction.sharded import Sharded
from hvdtrain.backends.torch.reduction.sharded_parameters import Bucket, ShardedParameters, memory_of
from hvdtrain.backends.torch.steps.parts import Parts
from hvdtrain.backends.torch.steps.update import Update, all_agree, scale_to_norm
from hvdtrain.host.cores import keep_freed


class ShardedUpdate(Update):
    """The update of a step after which every worker has the whole gradient and updates its part."""

    def __init__(self, parts: Parts, reducer: GradientReducer | None = None) -> None:
        self._shards: ShardedParameters = parts.shards
        super().__init__(parts, reducer)

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
        gradient = parameter.grad.detach()
        gradient = laid_out_as(parameter, gradient.to_dense() if gradient.is_sparse else gradient)
        return memory_of(gradient)[segment.begin : segment.end]


class ShardedGradientsUpdate(ShardedUpdate):
    """The update of a step in which every worker gets the sum of its part of the gradients alone."""

    _reducer: Sharded

    def __init__(self, parts: Parts) -> None:
        self._sums: list[torch.Tensor] = []  # of each bucket, this worker's part
        scaled = parts.loss_scale is not None
        super().__init__(parts, Sharded(parts.shards, parts.config.compression, scaled))
        keep_freed()  # of dropped gradients, which the next step would take anew

    def backward(self, losses: torch.Tensor, gradient_weights: torch.Tensor) -> None:
        """Collective, if it belongs to a step. Add a micro-batch's part to the sums of the gradients."""
        with self._reducer.in_pass():
            super().backward(losses, gradient_weights)
        if self._reducer.is_attached:
            self._lent = self._seen = self._look()

    def fill_in_unused(self) -> list[str]:
        """Return the names of the parameters that no micro-batch reached; their gradients are zero."""
        paths = [entry.path for entry in self._entries]
        self._unused = [place for place, path in enumerate(paths) if path not in self._reducer.reached]
        return [f"model/{paths[place]}" for place in self._unused]

    def reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """Collective. Wait for this worker's part of the gradients; return the sum of the step's vector."""
        self._clock.ready()
        self._sums, vector = self._reducer.finish([], self._with_reached(vector))
        self._clock.reduced()
        return self._without_reached(vector)

    def clip(self, clip_norm: float) -> torch.Tensor:
        """Collective. Scale the gradients so that their joint norm is at most that; return what it was."""
        squares = torch.stack([part.to(torch.float64).square().sum() for part in self._sums]).sum().cpu()
        norm: torch.Tensor = hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.gradient_norm").sqrt()
        scale_to_norm(self._sums, norm, clip_norm)
        return norm

    def update(self, learning_rate: float) -> None:
        """Collective. Let the optimizer update this worker's part, and gather all parts."""
        super().update(learning_rate)
        self._sums = []

    def _gradient_of(self, bucket: Bucket, segment: OwnSegment) -> torch.Tensor:
        part: torch.Tensor = segment.in_part(self._sums[bucket.number])
        return part

    def _gradients(self) -> list[torch.Tensor]:
        return self._sums

    _agreed = staticmethod(all_agree)
