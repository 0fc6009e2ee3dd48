"""The stages of a step in PyTorch, from the gradient weights to the moving average, in their order."""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter, is_
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.options import LOWEST_SCALE, LossScaleBase
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.reduction.shards import OwnSegment
from hvdtrain.backends.step_metrics import NORM_INDEX, OVERFLOW_INDEX
from hvdtrain.backends.steps import PartsBase
from hvdtrain.backends.torch.reduction.flat import laid_out_as
from hvdtrain.backends.torch.reduction.sharded_parameters import Bucket, Sharded, memory_of
from hvdtrain.errors import TaskError
from hvdtrain.host.cores import keep_freed

_grad = attrgetter("grad")  # of many parameters, in a step of few milliseconds

# the gradients of the parameters, and how often each has been changed in place
_Gradients = tuple[list[torch.Tensor | None], list[int]]


class LossScale(LossScaleBase):
    """Keeps the gradients of fp16 in its range: they are scaled up before and down after."""

    def to_broadcast(self) -> torch.Tensor:
        """Return what differs from step to step, for another worker to continue from."""
        return torch.tensor([self.value, self._steps_since_change], dtype=torch.float64)

    def follow(self, found: torch.Tensor) -> None:
        """Continue from what ``to_broadcast`` returned."""
        self.value, steps = found.tolist()
        self._steps_since_change = round(steps)

    def unscale(self, gradients: Sequence[torch.Tensor], agree: Callable[[bool], bool] = bool) -> bool:
        """Divide reduced gradients by the factor, in place, and adapt it; return whether they are finite."""
        largest = torch.stack([torch.linalg.vector_norm(g, float("inf")) for g in gradients])
        is_finite = agree(bool(torch.isfinite(largest).all()))
        if is_finite:
            for gradient in gradients:
                gradient.div_(self.factor)
        self.is_exhausted = not is_finite and self.value <= LOWEST_SCALE
        self._steps_since_change += 1
        if not is_finite:
            self.value, self._steps_since_change = max(LOWEST_SCALE, self.value / 2), 0
        elif self._steps_since_change >= self._growth_interval:
            self.value, self._steps_since_change = self.value * 2, 0
        return is_finite


class Update:
    """One optimizer update; a step calls the methods in the order in which they stand here.

    Parameters, the optimizer's slots and the moving average change only after every reduction of the
    step has succeeded.
    """

    def __init__(self, parts: PartsBase, reducer: GradientReducer | None = None) -> None:
        self._is_own = bool(parts.own_optimizer)
        self._is_local = parts.config.sync_every is not None
        self.loss_scale = parts.loss_scale
        self._entries = parts.trainable
        self._parameters = [entry.tensor for entry in parts.trainable]
        self._optimizer = parts.optimizers[MAIN]
        self._reducer = reducer or parts.reducer
        self._shards: Any = parts.shards
        self._ema, self._clock, self._clip_norm = parts.ema, parts.clock, parts.config.clip_norm
        self._expected = self._passes = 0
        self._lent: _Gradients = [], []
        self._seen: _Gradients = [], []
        self._unused: list[int] = []  # places of parameters without a gradient here
        self._left_out: list[int] = []  # those of them without one on any worker
        self.begin()

    def begin(self, reduces: bool = True) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        entries = self._entries if reduces else []
        self._reducer.attach({entry.path: entry.tensor for entry in entries})
        self._expected = self._passes = 1
        self._lent = self._seen = ([], []) if reduces else self._look()

    def expect(self, passes: int, in_warmup: bool = False) -> None:
        """Say how many backward passes follow; the reducer may give the parameters gradients to add to."""
        self._lent = self._seen = [], []  # of gradients that somebody holds, the reducer makes others
        self._reducer.follow(in_warmup, passes)
        self._expected = self._passes = passes
        self._lent = self._seen = self._look()

    def scale(self, gradient_weights: torch.Tensor) -> torch.Tensor:
        """Return the samples' gradient weights, times the loss scale."""
        return gradient_weights if self.loss_scale is None else gradient_weights * self.loss_scale.factor

    def backward(self, losses: torch.Tensor, gradient_weights: torch.Tensor) -> None:
        """Add a micro-batch's part to the gradients; the reducer may begin with those that are complete."""
        self.differentiate(partial(losses.backward, gradient_weights))

    def differentiate(self, run: Callable[[], object]) -> None:
        """Do a backward pass of any kind, which adds a micro-batch's part to the gradients."""
        self._check_unchanged()
        run()
        self._passes -= 1
        if self._passes:
            self._seen = self._look()

    def fill_in_unused(self) -> list[str]:
        """Set zero gradients for the parameters that no micro-batch reached, and return their names."""
        self._unused = []
        gradients: list[torch.Tensor | None] = list(map(_grad, self._parameters))
        for place, (gradient, lent, version) in enumerate(zip(gradients, *self._lent, strict=True)):
            if gradient is None or gradient.is_sparse:
                parameter = self._parameters[place]
                parameter.grad = fitting_gradient(self._optimizer, parameter, gradient, self._is_own)
            if gradient is None or (gradient is lent and gradient._version == version):
                self._unused.append(place)
        return [f"model/{self._entries[place].path}" for place in self._unused]

    def reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """Collective. Sum gradients, vector, and who has which gradient; return the vector."""
        self._clock.ready()
        self._seen = [], []  # the reducer may give the parameters others, and these be freed
        reduced, vector = self._reducer.finish(self._gradients(), self._with_reached(vector))
        self._clock.reduced()
        for parameter, gradient in zip(self._parameters, reduced, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return self._without_reached(vector)

    def unscale_or_skip(self, vector: torch.Tensor) -> bool:
        """Take the loss scale off the gradients; return whether they are finite, or the step is skipped."""
        if self.loss_scale is None:
            return True
        is_finite = self.loss_scale.unscale(self._gradients(), self._agreed)
        vector[OVERFLOW_INDEX] = float(self.loss_scale.is_exhausted)  # no scale will help
        return is_finite

    def normalize(self, counted: torch.Tensor | None, total_weight: float) -> None:
        """Divide the gradients by the share of the samples' weight that counted; by 1 if nothing did."""
        if counted is None or (not counted.is_cuda and counted.item() in (total_weight, 0.0)):
            return
        torch._foreach_mul_(self._gradients(), torch.where(counted > 0, total_weight / counted, 1.0))

    def clip(self, clip_norm: float) -> torch.Tensor:
        """Scale the gradients so that their joint norm is at most that; return what it was."""
        return torch.nn.utils.clip_grad_norm_(self._parameters, clip_norm)

    def update(self, learning_rate: float) -> None:
        """Let the optimizer take its step, without parameters that no worker has a gradient of."""
        self._leave_out()
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        self._optimizer.step()

    def apply(
        self,
        vector: torch.Tensor,
        form: tuple[Sequence[str], Sequence[str]],
        total_weight: float,
        learning_rate: float,
    ) -> torch.Tensor:
        """Collective. Do the stages from ``reduce`` to ``update``; return the sum of the step's vector."""
        vector = self.reduce(vector)
        if self.unscale_or_skip(vector) and total_weight:
            names, weighted = form
            self.normalize(vector[len(names)] if "loss" in weighted else None, total_weight)
            if self._clip_norm is not None:
                norm = self.clip(self._clip_norm)
                vector[NORM_INDEX] = 0.0 if self._is_local else norm
            self.update(learning_rate)
        return vector

    def zero_grad(self) -> None:
        """Drop the gradients."""
        self._optimizer.zero_grad()

    def ema(self, step: int) -> None:
        """Take the weights into their moving average; local steps leave that to ``synchronize``."""
        if not self._is_local:
            self._ema.update(self._ema.share(step))

    def _with_reached(self, vector: torch.Tensor) -> torch.Tensor:
        """Return a step's vector with a 1 for each parameter that has a gradient here, 0 for the others."""
        reached = vector.new_ones(len(self._parameters))
        if self._unused:
            reached[self._unused] = 0.0
        return torch.cat((vector, reached))

    def _without_reached(self, vector: torch.Tensor) -> torch.Tensor:
        """Return the sum of such vectors without that; a worker that lacks gradients looks at it."""
        end = len(vector) - len(self._parameters)
        counts = vector[end:][self._unused].tolist() if self._unused else []
        self._left_out = [place for place, n in zip(self._unused, counts, strict=True) if not n]
        return vector[:end]

    def _leave_out(self) -> None:
        """Drop the gradients of parameters that no worker has one of."""
        for place in self._left_out:
            self._parameters[place].grad = None

    def _look(self) -> _Gradients:
        """Return the gradients as they are, and how often each has been changed in place."""
        gradients = list(map(_grad, self._parameters))
        return gradients, [-1 if gradient is None else gradient._version for gradient in gradients]

    def _check_unchanged(self) -> None:
        """Refuse gradients that something other than a step's backward passes has changed."""
        gradients, versions = self._look()
        seen, known = self._seen
        if versions == known and all(map(is_, gradients, seen)):
            return
        for place, gradient in enumerate(gradients):
            if gradient is seen[place] and versions[place] == known[place]:
                continue
            is_first = self._passes == self._expected
            if is_first and (gradient is None or not (gradient.is_sparse or bool(gradient.any()))):
                continue
            raise TaskError(
                f"the gradient of {self._entries[place].path} was changed outside of the step's own backward "
                "pass; what a backward() of the task adds would be summed over workers, and not averaged",
                "Leave backward() and zero_grad() out of the task, and add what is to be minimized to the "
                "losses. For gradients of inputs, use torch.autograd.grad.",
            )

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]

    @staticmethod
    def _agreed(is_finite: bool) -> bool:
        """Return whether the gradients of all workers are finite; here, all have the same."""
        return is_finite


def fitting_gradient(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    gradient: torch.Tensor | None,
    is_own: bool = True,
) -> torch.Tensor:
    """Return a gradient, or zeros for None: sparse for SparseAdam, else dense, the same on all workers."""
    if not isinstance(optimizer, torch.optim.SparseAdam):
        if gradient is None:
            return torch.zeros_like(parameter)
        # these compute the same of a dense one
        if gradient.is_sparse and is_own and type(optimizer) not in (torch.optim.SGD, torch.optim.Adagrad):
            raise TaskError(
                f"a gradient is sparse, and {type(optimizer).__name__} of the task may need it so",
                "Use SGD, Adagrad or SparseAdam of torch.optim, or leave sparse=True out of the embedding.",
            )
        return gradient.to_dense() if gradient.is_sparse else gradient
    if gradient is not None:
        return gradient if gradient.is_sparse else gradient.detach().to_sparse(1)
    rows, places = parameter.new_zeros((0, *parameter.shape[1:])), torch.zeros((1, 0), dtype=torch.int64)
    shape = parameter.shape
    return torch.sparse_coo_tensor(places.to(rows.device), rows, shape, check_invariants=False)


def scale_to_norm(gradients: list[torch.Tensor], norm: torch.Tensor, clip_norm: float) -> None:
    """Scale gradients, whose joint norm is given on the host, to at most that, as torch.nn.utils does."""
    torch._foreach_mul_(gradients, float(torch.clamp(clip_norm / (norm + 1e-6), max=1.0)))


class ShardedUpdate(Update):
    """The update of a step after which every worker has the whole gradient and updates its part."""

    def zero_grad(self) -> None:
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

    def __init__(self, parts: PartsBase) -> None:
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
        return segment.in_part(self._sums[bucket.number])

    def _gradients(self) -> list[torch.Tensor]:
        return self._sums

    @staticmethod
    def _agreed(is_finite: bool) -> bool:
        """Collective. Return whether the gradients of all workers are finite."""
        lost = torch.tensor([0.0 if is_finite else 1.0])
        return not hvd.allreduce(lost, op=hvd.Sum, name="hvdtrain.overflow").item()
