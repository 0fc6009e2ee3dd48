"""The step of local SGD: each worker trains alone, then they are made equal; as in ``tensorflow/``."""

from collections.abc import Sequence
from dataclasses import replace

import horovod.torch as hvd
import torch

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.reduction.local_steps import (
    OUTER_PREFIX,
    LocalStepRules,
    LocalStepsBase,
    LocalSums,
    in_parts,
)
from hvdtrain.backends.step_metrics import PendingVector
from hvdtrain.backends.torch.batches import TorchBatch, TorchPending
from hvdtrain.backends.torch.reduction.flat import as_reals
from hvdtrain.backends.torch.state.model_state import Field
from hvdtrain.backends.torch.steps.parts import Parts
from hvdtrain.backends.torch.steps.plain_step import PlainStep


class LocalSteps(LocalStepsBase):
    """Adds up what local steps give, and makes the workers equal."""

    pending = TorchPending
    _zero = staticmethod(torch.Tensor.zero_)

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        entries = parts.trainable
        self._optimizer, self._tensors = parts.optimizers[MAIN], [entry.tensor for entry in entries]
        self._parameters = [tensor.detach() for tensor in self._tensors]
        self._starts: list[torch.Tensor] = []
        self._counted: list[float] = []  # the steps that the optimizer had counted when they began
        has_momentum = parts.config.outer_optimizer == "nesterov"
        self.momenta = [torch.zeros_like(p) for p in self._parameters] if has_momentum else []
        known = {id(tensor): momentum for tensor, momentum in zip(self._tensors, self.momenta, strict=False)}
        self.fields: list[Field] = [
            replace(field, tensors=tuple(known.get(id(t), t) for t in field.tensors), prefix=OUTER_PREFIX)
            for field in parts.tensors.fields
            if any(id(t) in known for t in field.tensors)
        ]

    def _note_start(self) -> None:
        self._counted = [float(count) for count in self._counts()]
        self._starts = [parameter.clone() for parameter in self._parameters] if self.momenta else []

    def _synchronized(self, sums: LocalSums) -> torch.Tensor:
        vector = self._average(sums.vector)
        if self.momenta:
            self._step()
        self._agree(sums.steps)
        self._ema.update(sums.ema_share(self._ema.decay))
        return vector

    def _average(self, vector: torch.Tensor) -> torch.Tensor:
        """Collective. Make parameters and slots equal, in place; return the sum of a vector."""
        if self._workers.size == 1:
            return vector
        slots = [value for one in self._slots() for key, value in one.items() if key != "step"]
        averaged = [*self._parameters, *slots]
        parts = in_parts([(str(tensor.dtype), tensor.nbytes) for tensor in averaged])
        for number, places in enumerate(parts):
            tensors = [averaged[place] for place in places]
            flat = torch.cat([tensor.flatten() for tensor in tensors])
            sent = as_reals(flat)
            sent = sent.float() if sent.dtype is torch.bfloat16 else sent  # of which Horovod sums none
            hvd.allreduce_(sent, op=hvd.Average, name=f"hvdtrain.local.{number}")
            if flat.dtype is torch.bfloat16:
                flat.copy_(sent)
            means = flat.split_with_sizes([tensor.numel() for tensor in tensors])
            torch._foreach_copy_(
                tensors, [mean.view(t.shape) for mean, t in zip(means, tensors, strict=True)]
            )
        summed: torch.Tensor = hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")
        return summed

    def _step(self) -> None:
        """Let the outer optimizer take its step, from where the local steps started."""
        momentum, rate = self._config.outer_momentum, self._config.outer_learning_rate
        gradients = torch._foreach_sub(self._starts, self._parameters)
        torch._foreach_mul_(self.momenta, momentum)
        torch._foreach_add_(self.momenta, gradients)
        torch._foreach_add_(gradients, self.momenta, alpha=momentum)
        torch._foreach_copy_(self._parameters, self._starts)
        torch._foreach_add_(self._parameters, gradients, alpha=-rate)
        self._starts = []

    def _agree(self, steps: float) -> None:
        """Collective with fp16. Take the most steps counted by a worker, and the lowest loss scale of all."""
        # with fp16 each worker skips steps by itself; otherwise one without samples has not counted the last
        counts = self._counts()
        if self._loss_scale is not None:
            steps = max((float(now) - n for now, n in zip(counts, self._counted, strict=True)), default=0.0)
            gathered = self._workers.allgather_object(
                (tuple(self._loss_scale.to_broadcast().tolist()), steps)
            )
            self._loss_scale.follow(torch.tensor(min(scale for scale, _ in gathered), dtype=torch.float64))
            steps = max(counted for _, counted in gathered)
        for now, before in zip(counts, self._counted, strict=True):
            now.fill_(before + steps)

    def _slots(self) -> list[dict[str, torch.Tensor]]:
        """Return what the optimizer keeps for each parameter; hvdtrain's have it from the beginning."""
        return [self._optimizer.state.get(tensor, {}) for tensor in self._tensors]

    def _counts(self) -> list[torch.Tensor]:
        return [slots["step"] for slots in self._slots() if "step" in slots]


class LocalStep(LocalStepRules, PlainStep):
    """A step of this worker alone; ``synchronize`` makes the workers equal."""

    local_kind = LocalSteps
    local: LocalSteps

    def train(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Do a step. Local: no collective."""
        self.local.begin()
        vector, unused = self.run(batch, learning_rate, signals)
        form = self.computation.names, self.computation.weighted
        return self.local.add(batch, form, vector, unused)
