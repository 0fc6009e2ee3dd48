"""The step of local SGD: each worker trains alone, then they are made equal; as in ``tensorflow/``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.reduction.local_steps import OUTER_PREFIX, LocalStepBase, LocalSums, in_parts
from hvdtrain.backends.torch.batches import TorchBatch, TorchPending
from hvdtrain.backends.torch.reduction.flat import as_reals
from hvdtrain.backends.torch.state.model_state import Field
from hvdtrain.backends.torch.steps.parts import Parts
from hvdtrain.backends.torch.steps.plain_step import PlainStep


class LocalStep(LocalStepBase, PlainStep):
    """A step of this worker alone; ``synchronize`` makes the workers equal."""

    pending = TorchPending
    _zero = staticmethod(torch.Tensor.zero_)

    def attach(self, parts: Parts) -> None:
        """Take the parts of the step. Local: no collective."""
        super().attach(parts)
        self._optimizer = parts.optimizers[MAIN]
        self._tensors = [entry.tensor for entry in parts.trainable]
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

    def _run(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> Any:
        vector, unused = self.run(batch, learning_rate, signals)
        return vector, self.computation.names, self.computation.weighted, unused

    def _note_start(self) -> None:
        self._counted = [float(count) for count in self._counts()]
        self._starts = [parameter.clone() for parameter in self._parameters] if self.momenta else []

    def _synchronized(self, sums: LocalSums) -> torch.Tensor:
        vector = self._make_equal(sums.vector)
        if self.momenta:
            self._step()
        self._agree(sums.steps)
        self.parts.ema.update(sums.ema_share(self.parts.ema.decay))
        return vector

    def _make_equal(self, vector: torch.Tensor) -> torch.Tensor:
        """Collective. Make parameters and slots equal, in place; return the sum of a vector."""
        if self.workers.size == 1:
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
        momentum, rate = self.parts.config.outer_momentum, self.parts.config.outer_learning_rate
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
        counts, scale = self._counts(), self.parts.loss_scale
        if scale is not None:
            steps = max((float(now) - n for now, n in zip(counts, self._counted, strict=True)), default=0.0)
            gathered = self.workers.allgather_object((tuple(scale.to_broadcast().tolist()), steps))
            scale.follow(torch.tensor(min(own for own, _ in gathered), dtype=torch.float64))
            steps = max(counted for _, counted in gathered)
        for now, before in zip(counts, self._counted, strict=True):
            now.fill_(before + steps)

    def _slots(self) -> list[dict[str, torch.Tensor]]:
        """Return what the optimizer keeps for each parameter; hvdtrain's have it from the beginning."""
        return [self._optimizer.state.get(tensor, {}) for tensor in self._tensors]

    def _counts(self) -> list[torch.Tensor]:
        return [slots["step"] for slots in self._slots() if "step" in slots]
