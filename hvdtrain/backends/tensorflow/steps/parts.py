"""What a job's step consists of: model, optimizers, reducer, moving average and others."""

import math
from typing import Any

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.steps import PartsBase
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.precision import new_loss_scale
from hvdtrain.backends.tensorflow.probes import count_frozen
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.tensorflow.replica_state import TrainedSet
from hvdtrain.backends.tensorflow.state.model_state import Field
from hvdtrain.backends.tensorflow.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.step_clock import StepClock
from hvdtrain.backends.tensorflow.steps.optimizers import choose_optimizer, make_optimizers, take_rates
from hvdtrain.backends.tensorflow.steps.sharded_state import ShardedMovingAverage, shard_optimizer
from hvdtrain.backends.tensorflow.sync_batch_norm import find_batch_norms
from hvdtrain.backends.tensorflow.task_model import unused_methods


class Parts(PartsBase):
    """What a step is made of."""

    averages = ExponentialMovingAverage, ShardedMovingAverage
    kinds = TrainedSet, find_batch_norms, count_frozen
    owned: dict[str, list[Field]]  # what each optimizer trains
    factors: dict[str, float]  # what the learning rate of each is multiplied by, if not by 1
    slots: list[Any]  # what the optimizers keep
    trained_set: TrainedSet

    @property
    def scale_variables(self) -> list[Any]:
        """The variables of the loss scale, if there is one."""
        return [] if self.loss_scale is None else self.loss_scale.variables

    @property
    def optimized(self) -> set[int]:
        """The identities of the variables that the only optimizer knows."""
        return {id(variable) for variable in self.optimizers[MAIN]._trainable_variables}

    def trained(self) -> list[Field]:
        """Return the tensors that are trained now."""
        return list(self.tensors.trainable_fields())

    def make_shards(self) -> ShardedParameters | None:
        """Return the parameters divided among workers; None if each updates all of them."""
        return ShardedParameters.of(self.config, self.trainable, self.workers)

    def make_optimizers(self) -> None:
        """Make the optimizers and what they keep, and take the rates of the task's own."""
        if self.own_optimizer == "tf_optimizers":
            self.optimizers, self.owned = make_optimizers(self.task, self.computation.model, self.tensors)
        else:
            optimizer = choose_optimizer(self.task, self.config, self.tensors, self.groups.options)
            self.optimizers, self.owned = {MAIN: optimizer}, {MAIN: self.trained()}
        self.factors = {}
        if self.own_optimizer:
            self.own_rates, self.factors = take_rates(self.optimizers, self.own_optimizer)
        pairs = [(optimizer, self.owned[name]) for name, optimizer in self.optimizers.items()]
        self.slots = [v for one, fields in pairs for v in shard_optimizer(one, fields, self.shards)]
        if self.own_optimizer:
            self.slot_bytes = sum(math.prod(v.shape) * native(v).dtype.size for v in self.slots)

    def make_rest(self, is_timed: bool) -> None:
        """Make loss scale, clock and notes."""
        computation, first = self.computation, next(iter(self.optimizers.values()))
        self.notes = unused_methods(computation.model)
        self.loss_scale = new_loss_scale(self.config, computation.precision, first, self.near)
        self.clock = StepClock(computation.traced_workers, is_timed)
