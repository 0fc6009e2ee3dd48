"""The step of local SGD: each worker trains alone, then they are made equal; as in ``tensorflow/``."""

from collections.abc import Iterator, Sequence
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
from hvdtrain.backends.torch.state.tensors import make_slots
from hvdtrain.backends.torch.steps.parts import Parts
from hvdtrain.backends.torch.steps.plain_step import PlainStep


class LocalSteps(LocalStepsBase):
    """Adds up what local steps give, and makes the workers equal."""

    pending = TorchPending
    averaged = (
        *(torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adamax),
        *(torch.optim.RAdam, torch.optim.RMSprop, torch.optim.SGD),
    )

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        entries = parts.trainable
        self._parameters = [entry.tensor.detach() for entry in entries]
        self._slots = _Slots(parts.optimizers[MAIN], [entry.tensor for entry in entries])
        self._starts: list[torch.Tensor] = []
        has_momentum = parts.config.outer_optimizer == "nesterov"
        self._momenta = [torch.zeros_like(p) for p in self._parameters] if has_momentum else []
        known = {id(e.tensor): momentum for e, momentum in zip(entries, self._momenta, strict=False)}
        self.fields: list[Field] = [
            replace(field, tensors=tuple(known.get(id(t), t) for t in field.tensors), prefix=OUTER_PREFIX)
            for field in parts.tensors.fields
            if any(id(t) in known for t in field.tensors)
        ]

    def begin(self) -> None:
        """Begin a local step: the first one notes where the workers start from."""
        if self._sums.steps == 0:
            self._slots.begin()
            self._starts = [parameter.clone() for parameter in self._parameters] if self._momenta else []

    def synchronize(self) -> TorchPending:
        """Collective. Make the workers equal, and return the sums of all local steps since they last were."""
        sums, self._sums = self._sums, LocalSums()
        self._slots.fill()
        vector = self._average(sums.vector)
        if self._momenta:
            self._step()
        self._agree(sums.steps)
        self._ema.update(sums.ema_share(self._ema.decay))
        return TorchPending(sums.names, vector, sums.weight, tuple(sums.unused), sums.weighted)

    def restart(self) -> None:
        """Start with no momentum of the outer optimizer."""
        for momentum in self._momenta:
            momentum.zero_()

    def to_broadcast(self) -> list[torch.Tensor]:
        """Return the outer optimizer's momentum as Horovod broadcasts it."""
        return self._momenta

    def _average(self, vector: torch.Tensor) -> torch.Tensor:
        """Collective. Make parameters and slots equal, in place; return the sum of a vector."""
        if self._workers.size == 1:
            return vector
        averaged = [*self._parameters, *self._slots.averaged()]
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
        torch._foreach_mul_(self._momenta, momentum)
        torch._foreach_add_(self._momenta, gradients)
        torch._foreach_add_(gradients, self._momenta, alpha=momentum)
        torch._foreach_copy_(self._parameters, self._starts)
        torch._foreach_add_(self._parameters, gradients, alpha=-rate)
        self._starts = []

    def _agree(self, steps: int) -> None:
        """Collective with fp16. Take the most steps counted by a worker, and the lowest loss scale of all."""
        # with fp16 each worker skips steps by itself; otherwise one without samples has not counted the last
        if self._loss_scale is None:
            self._slots.set_steps(steps)
            return
        own = tuple(self._loss_scale.to_broadcast().tolist()), self._slots.steps()
        gathered = self._workers.allgather_object(own)
        self._loss_scale.follow(torch.tensor(min(scale for scale, _ in gathered), dtype=torch.float64))
        self._slots.set_steps(max(counted for _, counted in gathered))


class LocalStep(LocalStepRules, PlainStep):
    """A step of this worker alone; ``synchronize`` makes the workers equal."""

    local_kind = LocalSteps
    local: LocalSteps

    def train(self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]) -> PendingVector:
        """Do a step. Local: no collective."""
        self.local.begin()
        vector, unused = self.run(batch, learning_rate, signals)
        return self.local.add(batch, self.computation.names, self.computation.weighted, vector, unused)


class _Slots:
    """What an optimizer keeps for parameters: counts of steps, and tensors that can be averaged."""

    def __init__(self, optimizer: torch.optim.Optimizer, parameters: Sequence[torch.Tensor]) -> None:
        self._optimizer = optimizer
        self._parameters = parameters
        self._may_be_missing = True
        self._before: dict[torch.Tensor, torch.Tensor] = {}

    def begin(self) -> None:
        """Note the counts of steps."""
        self._before = {parameter: count.clone() for parameter, count in self._counts().items()}

    def fill(self) -> None:
        """Let a task's optimizer make what it makes in its first step, if only others have taken one."""
        if self._may_be_missing and not any(self._optimizer.state.values()):
            make_slots(self._optimizer)
            self.set_steps(0)
        self._may_be_missing = False

    def averaged(self) -> list[torch.Tensor]:
        """Return the tensors that are averaged, in an order that is the same on every worker."""
        return [
            value
            for parameter in self._parameters
            for key, value in self._optimizer.state.get(parameter, {}).items()
            if key != "step"
        ]

    def steps(self) -> float:
        """Return the most steps that it has counted for a parameter since they were noted."""
        return max((float(now - before) for now, before in self._pairs()), default=0.0)

    def set_steps(self, steps: float) -> None:
        """Set the counts to so many more than were noted."""
        for now, before in self._pairs():
            now.copy_(before + steps)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the counts of steps, each with what was noted of it."""
        for parameter, now in self._counts().items():
            yield now, self._before.get(parameter, torch.zeros_like(now))

    def _counts(self) -> dict[torch.Tensor, torch.Tensor]:
        slots = {parameter: self._optimizer.state.get(parameter, {}) for parameter in self._parameters}
        return {parameter: of_one["step"] for parameter, of_one in slots.items() if "step" in of_one}
