"""Batch norm over the global batch, in PyTorch; ``tensorflow/sync_batch_norm.py`` does the same for Keras.

Statistics are those of a step's micro-batches of all workers together, each sample counted with its
weight, so that padding does not count. One all-reduce per layer and direction: forward of the sums
that give mean and variance, backward of the two sums through which they carry gradient.
"""

from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from hvdtrain.backends.workers import Sized, group_of
from hvdtrain.errors import TaskError

MARK = "synchronises"  # the attribute of a layer's class whose forward pass may be replaced in training


def find_batch_norms(model: torch.nn.Module) -> dict[str, _BatchNorm]:
    """Return the batch-norm layers of a model by their path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}


class BatchNormSync:
    """What the synchronised layers of a model share."""

    def __init__(self, workers: Sized) -> None:
        self.weights: Tensor | None = None  # (samples,), set before each micro-batch
        self.layers = 0  # how many it has taken over
        self._workers = workers
        self._group = group_of(workers)

    def take_over(self, model: torch.nn.Module) -> None:
        """Make a model's batch-norm layers normalise over all workers; their state stays as it is."""
        for path, layer in find_batch_norms(model).items():
            kind = type(layer)
            plain = kind.forward in (_BatchNorm.forward, torch.nn.SyncBatchNorm.forward)
            if not (plain or getattr(kind, MARK, False)):
                raise TaskError(
                    f"--sync-batch-norm cannot synchronise {path}: {kind.__name__} computes in its own way",
                    f"Give the model PyTorch's own layer; or, where that is as good in training, give "
                    f"{kind.__name__} the attribute {MARK} = True.",
                )
            # a class, not a function of this one layer: copies of the model must use their own state, and
            # belong to the same workers
            own = {"sync": self, "sync_name": f"hvdtrain.batch_norm.{path}"}
            layer.__class__ = type(f"Synchronised{kind.__name__}", (_Synchronised, kind), own)
            self.layers += 1

    def sum(self, vector: Tensor, name: str) -> Tensor:
        """Collective. Sum a vector over workers, in place; layers call in the model's order."""
        if self._workers.size == 1:
            return vector
        summed: Tensor = hvd.allreduce_(vector, op=hvd.Sum, name=name, **self._group)
        return summed

    def weights_of(self, x: Tensor) -> Tensor:
        """Return the weights of a tensor's rows, (rows,), fp64: those of their samples, or all alike."""
        assert self.weights is not None  # set before the model is called
        each, rest = divmod(len(x), len(self.weights))
        if rest:
            return torch.ones(len(x), dtype=torch.float64, device=x.device)
        return self.weights.double().repeat_interleave(each)


class _Synchronised(_BatchNorm):
    """The part of a synchronised layer that differs from the layer that it was."""

    sync: BatchNormSync
    sync_name: str

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - PyTorch's name
        """Normalise; in evaluation as the plain layer does."""
        if not self.training:
            return super().forward(input)
        if not isinstance(self, torch.nn.SyncBatchNorm):
            self._check_input_dim(input)  # type: ignore[no-untyped-call]
        weights = self.sync.weights_of(input)
        with torch.no_grad():
            mean, variance, count = moments(input, weights, self.sync, f"{self.sync_name}.forward")
            self._track(mean, variance, count)
        wide = torch.promote_types(input.dtype, torch.float32)
        gamma, beta = (None if p is None else p.to(wide) for p in (self.weight, self.bias))
        out: Tensor = _Normalise.apply(  # type: ignore[no-untyped-call]
            input, gamma, beta, mean.to(wide), variance.to(wide), weights / count.clamp(min=1), self
        )
        return out

    def _track(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        """Move the moving statistics, by the biased variance as Keras does, unless there was no sample."""
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        seen = count > 0
        self.num_batches_tracked.add_(seen)
        mean_of_all = 1 / self.num_batches_tracked.clamp(min=1)
        rate = seen * (mean_of_all if self.momentum is None else self.momentum)
        for running, new in ((self.running_mean, mean), (self.running_var, variance)):
            running.lerp_(new.to(running.dtype), rate.to(running.dtype))


def moments(x: Tensor, weights: Tensor, sync: BatchNormSync, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """Collective. Return mean and biased variance per channel over all workers, and the count behind them."""
    # deviations within each row are of the input's precision or fp32; rows and workers are put together in
    # fp64, where the difference of two large sums does no harm
    flat = x.to(torch.promote_types(x.dtype, torch.float32)).reshape(*x.shape[:2], -1)
    places, means = flat.shape[2], flat.mean(2)
    deviations = (flat - means[..., None]).square_().sum(2).double() if places > 1 else 0.0
    means = means.double()
    squares = deviations + means.square() * places
    sums = torch.cat((weights @ (means * places), weights @ squares, weights.sum()[None] * places))
    count, channels = sync.sum(sums, name)[-1], x.shape[1]
    mean, square = sums[:channels] / count.clamp(min=1), sums[channels:-1] / count.clamp(min=1)
    return mean, (square - mean.square()).clamp(min=0), count


class _Normalise(torch.autograd.Function):
    """(x - mean) / sqrt(variance + eps) * gamma + beta, with gradient through mean and variance, too.

    Ioffe and Szegedy 2015. With S1 and S2 the sums over all workers' rows of dy and of dy times the
    normalised x, n the count and w a row's weight, dx is
    gamma / sqrt(variance + eps) * (dy - w / n * (S1 + normalised x * S2)).
    A worker's dy is its part of the gradient of the mean loss over the global batch, so that S1 and S2 are
    plain sums over workers.
    """

    @staticmethod
    def forward(  # noqa: PLR0917 - called by position
        ctx: Any,
        x: Tensor,
        gamma: Tensor | None,
        beta: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        shares: Tensor,
        layer: _Synchronised,
    ) -> Tensor:
        """Normalise rows (rows, channels, ...); shares are their weights over the count."""
        ctx.save_for_backward(x, gamma, mean, variance, shares)
        ctx.layer = layer
        return torch.nn.functional.batch_norm(x, mean, variance, gamma, beta, eps=layer.eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Collective where x has a gradient."""
        x, gamma, mean, variance, shares = ctx.saved_tensors
        layer, needs_dx = ctx.layer, ctx.needs_input_grad[0]
        dx, dgamma, dbeta = torch.ops.aten.native_batch_norm_backward(
            dy, x, gamma, mean, variance, None, None, False, layer.eps, [needs_dx, True, True]
        )
        if needs_dx:
            sums = layer.sync.sum(torch.stack((dbeta, dgamma)).double(), f"{layer.sync_name}.backward")
            rescale = (variance.double() + layer.eps).rsqrt()
            scale = rescale if gamma is None else rescale * gamma
            slope = scale * rescale * sums[1]
            offset = scale * sums[0] - slope * mean
            row = (-1, *[1] * (x.dim() - 1))
            channel = (1, -1, *[1] * (x.dim() - 2))
            shares, wide = shares.view(row), mean.dtype
            through, along = ((shares * one.view(channel)).to(wide) for one in (offset, slope))
            dx -= torch.addcmul(through, along, x.to(wide))
        # of a parameter that is not there, none may be given
        pairs = zip((dgamma, dbeta), ctx.needs_input_grad[1:3], strict=True)
        return dx, *(d if needed else None for d, needed in pairs), None, None, None, None
