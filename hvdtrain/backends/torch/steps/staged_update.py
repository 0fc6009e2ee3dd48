"""The stages of a step in PyTorch if each worker has a part of the model's layers."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.pipeline.groups import Layout, StageReducer
from hvdtrain.backends.pipeline.state import StateOfStage
from hvdtrain.backends.torch.reduction.broadcast import broadcast_tensors
from hvdtrain.backends.torch.reduction.reducer import summed_meanwhile
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState
from hvdtrain.backends.torch.steps.update import Update, all_agree


class StagedState(StateOfStage, TrainingState):
    """Model and optimizer of one stage as a part of a portable state; the arguments are its bases'."""

    def replicated(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return all tensors that replicas have, with the path of the model's tensor that they belong to."""
        averages = dict(self.ema.to_broadcast())
        for entry in self.model.entries:
            slots = sorted(self._optimizers[0].state.get(entry.tensor, {}).items())
            average = averages.get(f"ema.{entry.path}")
            for tensor in (entry.tensor.detach(), *(value for _, value in slots), average):
                if isinstance(tensor, torch.Tensor):
                    yield entry.path, tensor

    @staticmethod
    def copy(tensors: Sequence[torch.Tensor], root: int, group: Mapping[str, Any], label: str) -> None:
        """Collective in a group. Copy a rank's tensors to the others."""
        broadcast_tensors([(str(n), tensor) for n, tensor in enumerate(tensors)], root, group, label)


class StagedReducer(StageReducer):
    """Sums the gradients of a stage; see ``StageReducer``."""

    def finish(self, gradients: Any, vector: Any = None) -> tuple[list[torch.Tensor], Any]:
        """Collective. Return the sum of each gradient over those that have it; sum a vector over all."""
        with summed_meanwhile(vector):
            return self.sums(gradients), vector


class StagedUpdate(Update):
    """The update of a step of a split model: this worker updates the parameters of its stage.

    Args:
        layout: the place of this worker.
        counted_elsewhere: the paths of the parameters that are an earlier stage's in the gradient's norm.
        *arguments: those of ``Update``.
        **options: likewise.
    """

    def __init__(
        self, layout: Layout, counted_elsewhere: Collection[str], *arguments: Any, **options: Any
    ) -> None:
        self._layout, self._counted_elsewhere = layout, counted_elsewhere
        super().__init__(*arguments, **options)

    def clip(self) -> None:
        """Collective, if the config has a norm. Scale the gradients of all stages to it."""
        if self._clip_norm is None:
            return
        squares = torch.zeros((), dtype=torch.float64)
        for entry in self._entries:
            if entry.tensor.grad is not None and entry.path not in self._counted_elsewhere:
                squares += entry.tensor.grad.to(torch.float64).square().sum().cpu()
        # every replica adds the same
        total = hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.gradient_norm") / self._layout.replicas
        factor = float(torch.clamp(self._clip_norm / (total.sqrt() + 1e-6), max=1.0))  # as torch.nn.utils
        if gradients := self._gradients():
            torch._foreach_mul_(gradients, factor)

    def _with_reached(self, vector: torch.Tensor) -> torch.Tensor:
        return vector  # which has the same numbers in all stages

    def _without_reached(self, vector: torch.Tensor) -> torch.Tensor:
        return vector

    _agreed = staticmethod(all_agree)
