"""The steps of a worker that has the whole model, and what they are made of; as in ``tensorflow/``."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import torch
from numpy.typing import NDArray

from hvdtrain.backends.objective.logits import check_foreign
from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.reduction.local_steps import OUTER_PREFIX, LocalStepBase, LocalSums, in_parts
from hvdtrain.backends.steps import PartsBase, WholeModelStep
from hvdtrain.backends.torch.batches import TorchBatch, TorchPending
from hvdtrain.backends.torch.computation import Computation
from hvdtrain.backends.torch.objective.gathering import COLLECTIVES
from hvdtrain.backends.torch.probes import count_frozen, values_of_first
from hvdtrain.backends.torch.reduction.all_reduce import check_kinds
from hvdtrain.backends.torch.reduction.broadcast import broadcast_model, broadcast_tensors
from hvdtrain.backends.torch.reduction.flat import as_reals
from hvdtrain.backends.torch.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.torch.replica_state import TrainedSet
from hvdtrain.backends.torch.state.model_state import Entry, Field, ModelState
from hvdtrain.backends.torch.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.torch.state.tensors import fill_slots, make_slots
from hvdtrain.backends.torch.step_clock import StepClock
from hvdtrain.backends.torch.steps.optimizer_state import (
    ShardedMovingAverage,
    ShardedState,
    TrainingState,
    shard_optimizer,
)
from hvdtrain.backends.torch.steps.optimizers import choose_optimizer, make_optimizers, take_rates
from hvdtrain.backends.torch.steps.update import LossScale, ShardedGradientsUpdate, ShardedUpdate, Update
from hvdtrain.backends.torch.sync_batch_norm import find_batch_norms
from hvdtrain.backends.torch.task_model import check_parts, foreign_leaf, unused_methods
from hvdtrain.errors import TaskError


class Parts(PartsBase):
    """What a step is made of."""

    averages = ExponentialMovingAverage, ShardedMovingAverage
    kinds = TrainedSet, find_batch_norms, count_frozen
    tensors: ModelState
    loss_scale: LossScale | None
    trained_set: TrainedSet

    @property
    def optimized(self) -> set[int]:
        """The identities of the parameters that the only optimizer knows."""
        return {id(p) for group in self.optimizers[MAIN].param_groups for p in group["params"]}

    def known(self) -> dict[str, set[int]]:
        """Return the identities of the parameters that the only optimizer knows, and keeps something for."""
        slots = {id(p) for p, kept in self.optimizers[MAIN].state.items() if kept}
        return {"optimized": self.optimized, "slots": slots}

    def trained(self) -> list[Entry]:
        """Return the tensors that are trained now."""
        return [entry for entry in self.tensors.entries if entry.trainable]

    def make_shards(self) -> ShardedParameters | None:
        """Return the parameters divided among workers; None if each updates all of them."""
        check_kinds(self.trainable, self.config)
        return ShardedParameters.of(self.config, self.trainable, self.workers)

    def make_optimizers(self) -> None:
        """Make the optimizers and what they keep, and take the rates of the task's own."""
        if self.own_optimizer == "torch_optimizers":
            self.optimizers = make_optimizers(self.task, self.computation.model, self.tensors)
        else:
            optimizer = choose_optimizer(self.task, self.config, self.tensors, self.groups.options)
            self.optimizers = {MAIN: optimizer}
        if self.own_optimizer:
            self.own_rates = take_rates(self.optimizers)
            are_sparse = any(isinstance(one, torch.optim.SparseAdam) for one in self.optimizers.values())
            if are_sparse and "powersgd" in self.config.compression:
                raise TaskError(
                    "SparseAdam takes sparse gradients, and compression powersgd makes them dense",
                    "Use compression none or fp16, or another optimizer.",
                )
            return
        shard_optimizer(self.optimizers[MAIN], self.shards)
        fill_slots(self.optimizers[MAIN])

    def make_rest(self, is_timed: bool) -> None:
        """Make loss scale, clock and notes."""
        model, workers = self.computation.model, self.workers
        on_parts = check_parts(model) if workers.size > 1 or workers.is_elastic else ()
        self.notes = *unused_methods(model), *on_parts
        self.loss_scale = LossScale(self.near) if self.config.precision == "fp16" else None
        self.clock = StepClock(workers, is_timed)

    def keep_slots(self, before: "Parts", kept: dict[str, list[str]] | None) -> None:
        optimizer: torch.optim.Optimizer = self.optimizers[MAIN]
        old: torch.optim.Optimizer = before.optimizers[MAIN]
        if kept is None:
            optimizer.state.update({parameter: slots for parameter, slots in old.state.items() if slots})
        elif self.own_optimizer:
            make_slots(optimizer, self.trained_set.ids_of(kept["slots"]))
        if self.own_optimizer and len(optimizer.param_groups) == len(old.param_groups):
            for group, of_old in zip(optimizer.param_groups, old.param_groups, strict=True):
                group.update({key: value for key, value in of_old.items() if key != "params"})


class PlainStep(WholeModelStep):
    """The mean gradient over the global batch, summed in one reduction, and an update with it."""

    collectives, pending = COLLECTIVES, TorchPending
    updates = Update, ShardedUpdate, ShardedGradientsUpdate
    states = TrainingState, ShardedState
    computes = Computation
    computation: Computation
    parts: Parts
    state: TrainingState

    def broadcast(self, root: int) -> None:
        """Collective. Copy the root's tensors to every worker."""
        parts, scale = self.parts, self.parts.loss_scale
        self.state.broadcast_optimizers(self.workers, root)
        broadcast_model(self.computation.model, parts.tensors, self.workers, root)
        broadcast_tensors(parts.ema.to_broadcast(), root, label="ema")
        parts.ema.follow_broadcast()
        broadcast_tensors(self.momenta, root, label="local")
        parts.reducer.broadcast(root)
        if scale is not None:
            scale.follow(hvd.broadcast_(scale.to_broadcast(), root, "hvdtrain.loss_scale"))

    def gradients(self, batch: TorchBatch) -> torch.Tensor:
        """Add this worker's part of the gradient to the parameters; return the weighted sums of values."""
        sums: torch.Tensor | None = None
        for micro_batch, weights, gradient_weights in self.computation.micro_batches(batch):
            rows = self.add_gradients(micro_batch, weights, gradient_weights)
            sums = torch.mv(rows, weights) if sums is None else sums.addmv_(rows, weights)
        assert sums is not None  # a step has at least one micro-batch
        return sums

    def add_gradients(
        self, micro_batch: Any, weights: torch.Tensor, gradient_weights: torch.Tensor, *, is_dry: bool = False
    ) -> torch.Tensor:
        """Add a micro-batch's part to the gradients, and return the rows of its values."""
        self.computation.batch_norm.weights = weights
        losses, own, rows = self.computation.per_sample(micro_batch, weights)
        if is_dry and (leaf := foreign_leaf(losses, self.computation.model)) is not None:
            check_foreign(self.parts.task, "torch", leaf, isinstance(leaf, torch.nn.Parameter))
        scaled = self.update.scale(gradient_weights)
        self.update.backward(losses, scaled if own is None else scaled * own)
        return rows

    def dry_run(self, batch: TorchBatch, training: bool) -> dict[str, NDArray[Any]]:
        """Return the loss and the metrics of a batch's first micro-batch, by name."""

        def rows_of(*micro_batch: Any) -> torch.Tensor:
            self.update.begin(reduces=False)
            try:
                return self.add_gradients(*micro_batch, is_dry=True)
            finally:
                self.update.zero_grad()
                self.update.begin()

        return values_of_first(self.computation, batch, training, rows_of)

    def forget(self) -> None:
        """Forget whatever a step that failed has begun. Local: no collective."""
        self.update.begin()
        self.update.zero_grad()

    def run(
        self, batch: TorchBatch, learning_rate: float, signals: Sequence[float]
    ) -> tuple[torch.Tensor, tuple[tuple[str, ...], tuple[str, ...], list[str]]]:
        """Collective. Do a step; return its vector, the names in it and the parameters without a gradient."""
        computation, update = self.computation, self.update
        update.zero_grad()
        update.expect(len(batch.weights), batch.in_warmup)
        sums = self.gradients(batch)
        unused = update.fill_in_unused()
        vector = torch.cat((sums, *self.parts.clock.numbers(), computation.numbers(unused, signals)))
        form = computation.names, computation.weighted
        # the weight is 0 for a worker without samples, as in the last local step: nothing is updated
        vector = update.apply(vector, form, batch.reduced_weight, learning_rate)
        update.ema(batch.step + 1)
        return vector, (*form, unused)

    def load_layers(self, state: PortableState) -> None:
        """Let layers load what they save themselves."""
        self.parts.tensors.load_extra_states(state)


class LocalStep(LocalStepBase, PlainStep):
    """A step of this worker alone; ``synchronize`` makes the workers equal."""

    _zero = staticmethod(torch.Tensor.zero_)

    def attach(self, parts: Parts) -> None:
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
        return hvd.allreduce(vector, op=hvd.Sum, name="hvdtrain.metrics")

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
