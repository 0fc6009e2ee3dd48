"""Makes what a job's step consists of: model, optimizers, reducer, moving average and others."""

import math
from dataclasses import dataclass, replace
from typing import Any

from hvdtrain.backends.optimizers import MAIN, ParameterGroups, own_optimizer_method
from hvdtrain.backends.records import ModelInfo, OwnRates
from hvdtrain.backends.reduction import GradientReducer, choose_reducer
from hvdtrain.backends.tensorflow.computation import Computation
from hvdtrain.backends.tensorflow.functions import native
from hvdtrain.backends.tensorflow.precision import LossScale, new_loss_scale
from hvdtrain.backends.tensorflow.probes import count_frozen
from hvdtrain.backends.tensorflow.reduction.sharded_parameters import ShardedParameters, make_shards
from hvdtrain.backends.tensorflow.replica_state import TrainedSet
from hvdtrain.backends.tensorflow.state.model_state import Field, ModelState
from hvdtrain.backends.tensorflow.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.tensorflow.step_clock import StepClock
from hvdtrain.backends.tensorflow.steps.optimizers import (
    NamedOptimizers,
    choose_optimizer,
    make_optimizers,
    take_rates,
)
from hvdtrain.backends.tensorflow.steps.sharded_state import ShardedMovingAverage, shard_optimizer
from hvdtrain.backends.tensorflow.sync_batch_norm import find_batch_norms
from hvdtrain.backends.tensorflow.task_model import unused_methods
from hvdtrain.backends.trained_set import frozen_by_config
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError


@dataclass(frozen=True)
class Parts:
    """What a step is made of."""

    task: Any  # the task
    config: Config  # the config
    computation: Computation  # what steps compute of a batch
    tensors: ModelState  # this worker's variables
    trainable: list[Field]  # those that are trained
    groups: ParameterGroups  # their groups, with the options of their optimizer
    own_optimizer: str  # the task's method that makes the optimizers; empty if none does
    named: NamedOptimizers  # the optimizers by name, each with the parameters that it trains
    own_rates: OwnRates | None  # their learning rates, if they are the task's own
    factors: dict[str, float]  # what the learning rate of each is multiplied by, if not by 1
    slots: list[Any]  # what the optimizers keep
    shards: ShardedParameters | None  # the parameters, if workers share their state; else None
    ema: ExponentialMovingAverage  # the moving average of the weights
    loss_scale: LossScale | None  # the loss scale of fp16, or None
    reducer: GradientReducer  # sums gradients over workers
    clock: StepClock  # measures how long this worker is busy
    trained_set: TrainedSet  # what is trained, as callbacks may change it

    @property
    def optimizers(self) -> dict[str, Any]:
        """The optimizers by name."""
        return {name: optimizer for name, (optimizer, _) in self.named.items()}

    @property
    def scale_variables(self) -> list[Any]:
        """The variables of the loss scale, if there is one."""
        return [] if self.loss_scale is None else self.loss_scale.variables

    @property
    def optimized(self) -> set[int]:
        """The identities of the variables that the only optimizer knows."""
        return {id(variable) for variable in self.named[MAIN][0]._trainable_variables}


def make_parts(step: Any, task: Any, config: Config, batch: HostBatch | None, is_cpu: bool) -> Parts:
    """Make the parts of a step, with initial values. Collective if the model is split."""
    tensors, computation = step.make_model(batch), step.computation
    own_optimizer = own_optimizer_method(task, config)
    groups = ParameterGroups(config, step.shapes, own_optimizer)
    tensors.freeze(groups.frozen)
    trainable = list(tensors.trainable_fields())
    if not groups.options:
        raise TaskError("the model has no trainable variable")
    shards = make_shards(config, trainable, step.workers)
    made = _make_optimizers(task, config, computation.model, tensors, groups, own_optimizer, shards)
    ema = (
        ExponentialMovingAverage(tensors, config.ema_decay)
        if shards is None
        else ShardedMovingAverage(tensors, config.ema_decay, shards)
    )
    first = next(iter(made[0].values()))[0]
    loss_scale = new_loss_scale(config, computation.precision, first, step.near)
    reducer = choose_reducer(config, step.near, trainable, loss_scale)
    clock = StepClock(computation.traced_workers, step.is_timed and is_cpu)
    return Parts(
        task, config, computation, tensors, trainable, groups, own_optimizer,
        *made, shards, ema, loss_scale, reducer, clock, TrainedSet(computation.model, tensors),
    )  # fmt: skip


def renewed_parts(parts: Parts, kept: dict[str, list[str]] | None) -> Parts:
    """Return the parts for the parameters that are trainable now; what others keep of them stays."""
    tensors, trained_set = parts.tensors, parts.trained_set
    if kept is None:
        trained_set.optimize(parts.optimized)
    else:
        trained_set.follow(kept)
    shapes = {field.name: field.shape for field in tensors.trainable_fields()}
    groups = ParameterGroups(parts.config, shapes, parts.own_optimizer)
    if groups.frozen:
        raise frozen_by_config(sorted(groups.frozen))
    model = parts.computation.model
    made = _make_optimizers(
        parts.task, parts.config, model, tensors, groups, parts.own_optimizer, parts.shards
    )
    ema = parts.ema.renewed(tensors)
    trained_set.accept()
    trainable = list(tensors.trainable_fields())
    others: dict[str, Any] = dict(zip(("named", "own_rates", "factors", "slots"), made, strict=True))
    return replace(parts, trainable=trainable, groups=groups, ema=ema, **others)


def describe_parts(step: Any, parts: Parts) -> ModelInfo:
    """Return what is known of a job when its parts are made."""
    computation, model = parts.computation, parts.computation.model
    return ModelInfo(
        {name: step.shapes[name] for name in parts.groups.options},
        len(find_batch_norms(model)),
        parts.reducer.describe(),
        parts.own_rates,
        notes=tuple(unused_methods(model)),
        groups=tuple(parts.groups.lines),
        frozen_parameters=count_frozen(model),
        synchronized_layers=computation.batch_norm.layers,
        slot_bytes=sum(math.prod(v.shape) * native(v).dtype.size for v in parts.slots)
        if parts.own_optimizer
        else 0,
        float_bits=computation.wrap.float_bits,
        leaves_out_padding=computation.is_own_loss,
    )


def _make_optimizers(  # noqa: PLR0917 - parts, in the order in which they are made
    task: Any,
    config: Config,
    model: Any,
    tensors: ModelState,
    groups: ParameterGroups,
    own_optimizer: str,
    shards: ShardedParameters | None,
) -> tuple[NamedOptimizers, OwnRates | None, dict[str, float], list[Any]]:
    """Make the optimizers and what they keep; return also the rates of the task's own, and their factors."""
    if own_optimizer == "tf_optimizers":
        named = make_optimizers(task, model, tensors)
    else:
        optimizer = choose_optimizer(task, config, tensors, groups.options)
        named = {MAIN: (optimizer, list(tensors.trainable_fields()))}
    own_rates: OwnRates | None = None
    factors: dict[str, float] = {}
    if own_optimizer:
        own_rates, factors = take_rates({name: one for name, (one, _) in named.items()}, own_optimizer)
    slots = [v for one, fields in named.values() for v in shard_optimizer(one, fields, shards)]
    return named, own_rates, factors, slots
