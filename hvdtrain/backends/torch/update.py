"""The stages of a step in PyTorch, from the gradient weights to the moving average, in their order."""

from collections.abc import Sequence

import horovod.torch as hvd
import torch

from hvdtrain.agreement import Workers
from hvdtrain.backends.base import OVERFLOW_INDEX
from hvdtrain.backends.torch.ema import ExponentialMovingAverage
from hvdtrain.backends.torch.model_state import Entry
from hvdtrain.backends.torch.precision import LossScale
from hvdtrain.backends.torch.reduction import GradientReducer
from hvdtrain.backends.torch.step_clock import StepClock


class Update:
    """One optimizer update; a step calls the methods in the order in which they stand here.

    Parameters, the optimizer's slots and the moving average change only after every reduction of the
    step has succeeded.

    Args:
        trainable: the trainable parameters.
        optimizer: the optimizer.
        reducer: sums gradients over workers.
        ema: the moving average of the weights.
        clock: measures how long this worker is busy.
        workers: the job's workers.
        clip_norm: largest norm of the gradient, or None.
        loss_scale: the loss scale of fp16, or None.
    """

    def __init__(
        self,
        trainable: Sequence[Entry],
        optimizer: torch.optim.Optimizer,
        reducer: GradientReducer,
        ema: ExponentialMovingAverage,
        clock: StepClock,
        *,
        workers: Workers,
        clip_norm: float | None = None,
        loss_scale: LossScale | None = None,
    ) -> None:
        self.loss_scale = loss_scale
        self._entries = list(trainable)
        self._parameters = [entry.tensor for entry in trainable]
        self._optimizer = optimizer
        self._reducer = reducer
        self._ema = ema
        self._clock = clock
        self._workers = workers
        self._clip_norm = clip_norm
        self._lent: list[tuple[torch.Tensor | None, int]] = []
        self.begin()

    def begin(self, reduces: bool = True) -> None:
        """Forget whatever a step that failed has begun. Local: no collective.

        Args:
            reduces: whether backward passes that follow belong to a step; if not, they begin no reduction.
        """
        entries = self._entries if reduces else []
        self._reducer.attach({entry.path: entry.tensor for entry in entries})
        self._lent = [(None, 0)] * len(self._entries)

    def expect(self, passes: int) -> None:
        """Say how many backward passes follow; the reducer may give the parameters gradients to add to.

        Called while no parameter has a gradient.
        """
        self._reducer.expect(passes)
        gradients = (parameter.grad for parameter in self._parameters)
        self._lent = [(g, 0 if g is None else g._version) for g in gradients]

    def scale(self, gradient_weights: torch.Tensor) -> torch.Tensor:
        """Return the samples' gradient weights, times the loss scale."""
        return gradient_weights if self.loss_scale is None else gradient_weights * self.loss_scale.factor

    def backward(self, losses: torch.Tensor, gradient_weights: torch.Tensor) -> None:
        """Add a micro-batch's part to the gradients; the reducer may begin with those that are complete."""
        losses.backward(gradient_weights)  # type: ignore[no-untyped-call]

    def fill_in_unused(self) -> list[str]:
        """Set zero gradients for the parameters that no micro-batch reached, and return their names.

        So every worker reduces all parameters, and weight decay and momentum act on them alike at any
        number of workers.
        """
        unused = []
        for entry, (lent, version) in zip(self._entries, self._lent, strict=True):
            gradient = entry.tensor.grad
            if gradient is None:
                entry.tensor.grad = torch.zeros_like(entry.tensor)
            if gradient is None or (gradient is lent and gradient._version == version):
                unused.append(entry)
        return [f"model/{entry.path}" for entry in unused]

    def reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """Collective. Sum the gradients and the step's vector over workers; return the vector."""
        handle = None
        if self._workers.size > 1:
            handle = hvd.allreduce_async_(vector, op=hvd.Sum, name="hvdtrain.metrics")
        self._clock.ready()
        try:
            reduced = self._reducer.finish(self._gradients())
        finally:
            if handle is not None:
                hvd.synchronize(handle)
        self._clock.reduced()
        for parameter, gradient in zip(self._parameters, reduced, strict=True):
            if parameter.grad is not gradient:
                parameter.grad = gradient
        return vector

    def unscale_or_skip(self, vector: torch.Tensor) -> bool:
        """Take the loss scale off the gradients; return whether they are finite, or the step is skipped.

        If they are not at the lowest scale, the vector's flag is set: no scale will help.
        """
        if self.loss_scale is None:
            return True
        is_finite = self.loss_scale.unscale(self._gradients())
        vector[OVERFLOW_INDEX] = float(self.loss_scale.is_exhausted)
        return is_finite

    def normalize(self, counted: torch.Tensor | None, total_weight: float) -> None:
        """Divide the gradients by the share of the samples' weight that counted; by 1 if nothing did.

        Args:
            counted: sum of the loss's own weights over all workers, a single number; None if it has none.
            total_weight: sum of the samples' weights over all workers.
        """
        if counted is None or (not counted.is_cuda and counted.item() in (total_weight, 0.0)):
            return
        torch._foreach_mul_(self._gradients(), torch.where(counted > 0, total_weight / counted, 1.0))

    def clip(self) -> None:
        """Scale the gradients so that their joint norm is at most the config's."""
        if self._clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)

    def update(self, learning_rate: float) -> None:
        """Let the optimizer take its step."""
        for group in self._optimizer.param_groups:
            group["lr"] = learning_rate * group.get("lr_scale", 1.0)
        self._optimizer.step()

    def ema(self, step: int) -> None:
        """Take the weights into their moving average.

        Args:
            step: steps done, this one included.
        """
        self._ema.update(self._ema.share(step))

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]
