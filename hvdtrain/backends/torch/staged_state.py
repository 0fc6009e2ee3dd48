"""The state of one stage of a split model in PyTorch, copied among those that have the same."""

from collections.abc import Iterator

import torch

from hvdtrain.backends.pipeline.groups import group_of
from hvdtrain.backends.pipeline.staged_state import StateOfStage
from hvdtrain.backends.torch.reduction.broadcast import broadcast_tensors
from hvdtrain.backends.torch.state.model_state import Entry
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState


class StagedState(StateOfStage, TrainingState):
    """Model and optimizer of one stage as a part of a portable state; the arguments are its bases'."""

    def broadcast(self, optimizer: torch.optim.Optimizer) -> None:
        """Collective. Copy what the first of those workers has that have the same to the others.

        Args:
            optimizer: that of this worker's stage.
        """
        averages = dict(self.ema.to_broadcast())
        for entry in self.model.entries:
            tensors = [entry.tensor.detach(), *self._slots_of(optimizer, entry)]
            tensors += [tensor for name, tensor in averages.items() if name == f"ema.{entry.path}"]
            group = self._groups.of(self._owners[entry.path])
            if group.size == 1:
                continue
            first = self._layout.ranks_of_stage(self._owners[entry.path][0])[0]
            named = [(str(number), tensor) for number, tensor in enumerate(tensors)]
            broadcast_tensors(named, first, group_of(group), f"stage.{entry.path}")

    @staticmethod
    def _slots_of(optimizer: torch.optim.Optimizer, entry: Entry) -> Iterator[torch.Tensor]:
        for _, value in sorted(optimizer.state.get(entry.tensor, {}).items()):
            if isinstance(value, torch.Tensor):
                yield value
