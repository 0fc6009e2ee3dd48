"""Makes what a job's step consists of: model, optimizers, reducer, moving average and others."""

from dataclasses import dataclass, replace
from typing import Any

import torch

from hvdtrain.backends.optimizers import MAIN, ParameterGroups, own_optimizer_method
from hvdtrain.backends.records import ModelInfo, OwnRates
from hvdtrain.backends.reduction import GradientReducer, choose_reducer
from hvdtrain.backends.torch.computation import Computation
from hvdtrain.backends.torch.precision import LossScale
from hvdtrain.backends.torch.probes import count_frozen
from hvdtrain.backends.torch.reduction.reducer import check_kinds
from hvdtrain.backends.torch.reduction.sharded_parameters import ShardedParameters, make_shards
from hvdtrain.backends.torch.replica_state import TrainedSet
from hvdtrain.backends.torch.state.model_state import Entry, ModelState
from hvdtrain.backends.torch.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.torch.state.tensors import fill_slots, make_slots
from hvdtrain.backends.torch.step_clock import StepClock
from hvdtrain.backends.torch.steps.optimizers import choose_optimizer, make_optimizers, take_rates
from hvdtrain.backends.torch.steps.sharded_state import ShardedMovingAverage, shard_optimizer
from hvdtrain.backends.torch.sync_batch_norm import find_batch_norms
from hvdtrain.backends.torch.task_model import check_parts, unused_methods
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
    tensors: ModelState  # this worker's tensors
    trainable: list[Entry]  # those that are trained
    groups: ParameterGroups  # their groups, with the options of their optimizer
    own_optimizer: str  # the task's method that makes the optimizers; empty if none does
    optimizers: dict[str, torch.optim.Optimizer]  # by name
    own_rates: OwnRates | None  # their learning rates, if they are the task's own
    shards: ShardedParameters | None  # the parameters, if workers share their state; else None
    ema: ExponentialMovingAverage  # the moving average of the weights
    loss_scale: LossScale | None  # the loss scale of fp16, or None
    reducer: GradientReducer  # sums gradients over workers
    clock: StepClock  # measures how long this worker is busy
    trained_set: TrainedSet  # what is trained, as callbacks may change it
    notes: tuple[str, ...]  # what the user should know of the model

    @property
    def optimized(self) -> set[int]:
        """The identities of the parameters that the only optimizer knows."""
        return {id(p) for group in self.optimizers[MAIN].param_groups for p in group["params"]}

    @property
    def slotted(self) -> set[int]:
        """The identities of the parameters for which the only optimizer keeps something."""
        return {id(p) for p, slots in self.optimizers[MAIN].state.items() if slots}


def make_parts(step: Any, task: Any, config: Config, batch: HostBatch | None) -> Parts:
    """Make the parts of a step, with initial values. Collective if the model is split."""
    tensors, computation, workers = step.make_model(batch), step.computation, step.workers
    model = computation.model
    on_parts = check_parts(model) if workers.size > 1 or workers.is_elastic else ()
    own_optimizer = own_optimizer_method(task, config)
    groups = ParameterGroups(config, step.shapes, own_optimizer)
    tensors.freeze(groups.frozen)
    trainable = [entry for entry in tensors.entries if entry.trainable]
    if not groups.options:
        raise TaskError("the model has no parameter that requires a gradient")
    check_kinds(trainable, config)
    shards = make_shards(config, trainable, workers)
    made = _make_optimizers(task, config, model, tensors, groups, own_optimizer, shards)
    if "powersgd" in config.compression and any(
        isinstance(o, torch.optim.SparseAdam) for o in made[0].values()
    ):
        raise TaskError(
            "SparseAdam takes sparse gradients, and compression powersgd makes them dense",
            "Use compression none or fp16, or another optimizer.",
        )
    ema = (
        ExponentialMovingAverage(tensors, config.ema_decay)
        if shards is None
        else ShardedMovingAverage(tensors, config.ema_decay, shards)
    )
    loss_scale = LossScale(step.near) if config.precision == "fp16" else None
    reducer = choose_reducer(config, step.near, tensors.trainable_fields(), loss_scale)
    clock = StepClock(workers, step.is_timed and computation.device.type == "cpu")
    return Parts(
        task, config, computation, tensors, trainable, groups, own_optimizer,
        *made, shards, ema, loss_scale, reducer, clock, TrainedSet(model, tensors), tuple(on_parts),
    )  # fmt: skip


def renewed_parts(parts: Parts, kept: dict[str, list[str]] | None) -> Parts:
    """Return the parts for the parameters that are trainable now; what others keep of them stays."""
    tensors, trained_set, before = parts.tensors, parts.trained_set, parts.optimizers[MAIN]
    if kept is None:
        trained_set.optimize(parts.optimized)
    else:
        trained_set.follow(kept)
    shapes = {field.name: field.shape for field in tensors.trainable_fields()}
    groups = ParameterGroups(parts.config, shapes, parts.own_optimizer)
    if groups.frozen:
        raise frozen_by_config(sorted(groups.frozen))
    model = parts.computation.model
    optimizers, own_rates = _make_optimizers(
        parts.task, parts.config, model, tensors, groups, parts.own_optimizer, parts.shards
    )
    optimizer = optimizers[MAIN]
    if kept is None:
        optimizer.state.update({parameter: slots for parameter, slots in before.state.items() if slots})
    elif parts.own_optimizer:
        make_slots(optimizer, trained_set.ids_of(kept["slots"]))
    if parts.own_optimizer and len(optimizer.param_groups) == len(before.param_groups):
        for group, old in zip(optimizer.param_groups, before.param_groups, strict=True):
            group.update({key: value for key, value in old.items() if key != "params"})
    ema = parts.ema.renewed(tensors)
    trained_set.accept()
    trainable = [entry for entry in tensors.entries if entry.trainable]
    return replace(
        parts, trainable=trainable, groups=groups, ema=ema, optimizers=optimizers, own_rates=own_rates
    )


def describe_parts(step: Any, parts: Parts) -> ModelInfo:
    """Return what is known of a job when its parts are made."""
    computation, model = parts.computation, parts.computation.model
    return ModelInfo(
        {name: step.shapes[name] for name in parts.groups.options},
        len(find_batch_norms(model)),
        parts.reducer.describe(),
        parts.own_rates,
        notes=(*unused_methods(model), *parts.notes),
        groups=tuple(parts.groups.lines),
        frozen_parameters=count_frozen(model),
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
) -> tuple[dict[str, torch.optim.Optimizer], OwnRates | None]:
    """Make the optimizers; return also the rates of the task's own."""
    if own_optimizer == "torch_optimizers":
        optimizers = make_optimizers(task, model, tensors)
    else:
        optimizers = {MAIN: choose_optimizer(task, config, tensors, groups.options)}
    if own_optimizer:
        return optimizers, take_rates(optimizers)
    shard_optimizer(optimizers[MAIN], shards)
    fill_slots(optimizers[MAIN])
    return optimizers, None
