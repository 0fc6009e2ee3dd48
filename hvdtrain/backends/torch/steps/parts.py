"""What a job's step consists of: model, optimizers, reducer, moving average and others."""

import torch

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.steps import PartsBase
from hvdtrain.backends.torch.precision import LossScale
from hvdtrain.backends.torch.probes import count_frozen
from hvdtrain.backends.torch.reduction.reducer import check_kinds
from hvdtrain.backends.torch.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.torch.replica_state import TrainedSet
from hvdtrain.backends.torch.state.model_state import Entry, ModelState
from hvdtrain.backends.torch.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.torch.state.tensors import fill_slots, make_slots
from hvdtrain.backends.torch.step_clock import StepClock
from hvdtrain.backends.torch.steps.optimizers import choose_optimizer, make_optimizers, take_rates
from hvdtrain.backends.torch.steps.sharded_state import ShardedMovingAverage, shard_optimizer
from hvdtrain.backends.torch.sync_batch_norm import find_batch_norms
from hvdtrain.backends.torch.task_model import check_parts, unused_methods
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

    @property
    def slotted(self) -> set[int]:
        """The identities of the parameters for which the only optimizer keeps something."""
        return {id(p) for p, slots in self.optimizers[MAIN].state.items() if slots}

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
        """Take what the optimizer had before, where it is not loaded again."""
        optimizer: torch.optim.Optimizer = self.optimizers[MAIN]
        old: torch.optim.Optimizer = before.optimizers[MAIN]
        if kept is None:
            optimizer.state.update({parameter: slots for parameter, slots in old.state.items() if slots})
        elif self.own_optimizer:
            make_slots(optimizer, self.trained_set.ids_of(kept["slots"]))
        if self.own_optimizer and len(optimizer.param_groups) == len(old.param_groups):
            for group, of_old in zip(optimizer.param_groups, old.param_groups, strict=True):
                group.update({key: value for key, value in of_old.items() if key != "params"})
