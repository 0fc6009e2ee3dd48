"""The stages of a step in PyTorch if each worker has a part of the model's layers."""

from collections.abc import Callable, Iterator

import horovod.torch as hvd
import torch

from hvdtrain.backends.pipeline.stage_step import SharedUpdate
from hvdtrain.backends.pipeline.state import StateOfStage
from hvdtrain.backends.reduction import GradientReducer
from hvdtrain.backends.step_metrics import OVERFLOW_INDEX
from hvdtrain.backends.torch.reduction.broadcast import broadcast_tensors
from hvdtrain.backends.torch.reduction.reducer import summed_meanwhile
from hvdtrain.backends.torch.state.model_state import Entry
from hvdtrain.backends.torch.steps.optimizer_state import TrainingState
from hvdtrain.backends.torch.steps.update import Update
from hvdtrain.backends.workers import group_of


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


class StagedUpdate(SharedUpdate, Update):
    """The update of a step of a split model: this worker updates the parameters of its stage."""

    def begin(self, reduces: bool = True) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        super().begin(reduces)
        for reducer, entries in self._parts():
            reducer.attach({entry.path: entry.tensor for entry in entries} if reduces else {})

    def expect(self, passes: int, in_warmup: bool = False) -> None:
        """Say how many backward passes follow; the reducers may give the parameters gradients to add to."""
        self._lent = self._seen = [], []
        for reducer, _ in self._parts():
            reducer.follow(in_warmup, passes)
        self._expected = self._passes = passes
        self._lent = self._seen = self._look()

    def differentiate(self, run: Callable[[], object]) -> None:
        """Do a backward pass of this stage; as ``backward``.

        Args:
            run: adds a micro-batch's part to the gradients.
        """
        self._differentiate(run)

    def reduce(self, vector: torch.Tensor) -> torch.Tensor:
        """Collective. Sum the gradients over those that have them, and the step's vector over all workers."""
        self._clock.ready()
        with summed_meanwhile(vector):
            for reducer, entries in self._parts():
                given = [entry.tensor.grad for entry in entries if entry.tensor.grad is not None]
                reduced = reducer.finish(given)[0] if given else ()
                for entry, gradient in zip(entries, reduced, strict=True):
                    if entry.tensor.grad is not gradient:
                        entry.tensor.grad = gradient
        self._clock.reduced()
        return vector

    def unscale_or_skip(self, vector: torch.Tensor) -> bool:
        """Collective, with a loss scale. As without stages; the workers agree on whether to skip."""
        if self.loss_scale is None:
            return True
        is_finite = self.loss_scale.unscale(self._gradients(), _agreed)
        vector[OVERFLOW_INDEX] = float(self.loss_scale.is_exhausted)
        return is_finite

    def clip(self) -> None:
        """Collective, if the config has a norm. Scale the gradients of all stages to it."""
        if self._clip_norm is None:
            return
        squares = torch.zeros((), dtype=torch.float64)
        for entry in self._entries:
            if entry.tensor.grad is not None and self._shared.get(entry.path, (None, True))[1]:
                gradient = entry.tensor.grad
                values = gradient.coalesce().values() if gradient.is_sparse else gradient
                squares += values.to(torch.float64).square().sum().cpu()
        # every replica adds the same
        total = hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.gradient_norm") / self._layout.replicas
        factor = float(torch.clamp(self._clip_norm / (total.sqrt() + 1e-6), max=1.0))  # as torch.nn.utils
        if gradients := self._gradients():
            torch._foreach_mul_(gradients, factor)

    def _parts(self) -> list[tuple[GradientReducer, list[Entry]]]:
        return self._parts_of(self._entries)


def _agreed(is_finite: bool) -> bool:
    lost = torch.tensor([0.0 if is_finite else 1.0])
    return not hvd.allreduce(lost, op=hvd.Sum, name="hvdtrain.overflow").item()
