"""Sharded state in PyTorch as portable state: gathered part by part on rank 0, and given out again."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.backends.portable.initial_values import PREFIX
from hvdtrain.backends.portable.names import PRIVATE
from hvdtrain.backends.portable.training_state import CommonShardedState, ShardedSlot
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.reduction.shards import CommonShardedAverage, OwnSegment
from hvdtrain.backends.torch.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.torch.state.model_state import Field, ModelState
from hvdtrain.backends.torch.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.torch.steps.optimizer_state import SLOTS, TrainingState
from hvdtrain.workers.agreement import Workers


def shard_optimizer(optimizer: torch.optim.Optimizer, shards: ShardedParameters | None) -> None:
    """Let an optimizer of hvdtrain's that has made no slots yet update this worker's segments."""
    if shards is None:
        return
    owned: dict[int, list[OwnSegment]] = {}
    for segment in shards.segments:
        owned.setdefault(id(segment.entry.tensor), []).append(segment)
    for group in optimizer.param_groups:
        group["params"] = [s.tensor for parameter in group["params"] for s in owned.get(id(parameter), ())]


class ShardedMovingAverage(CommonShardedAverage, ExponentialMovingAverage):
    """The moving average of this worker's part of the weights."""

    _native, _copy = staticmethod(lambda tensor: tensor), staticmethod(torch.clone)


_STEP = "optimizer/step"


class ShardedState(CommonShardedState, TrainingState):
    """Model and sharded optimizer as portable state."""

    def __init__(
        self,
        model: ModelState,
        optimizer: torch.optim.Optimizer,
        ema: ShardedMovingAverage,
        shards: ShardedParameters,
    ) -> None:
        super().__init__(model, {}, ema)
        self._optimizer, self._shards = optimizer, shards
        group = optimizer.param_groups[0]
        self._count_names = [_STEP] if "betas" in group else []
        momentum = [] if self._count_names or not group["momentum"] else ["momentum_buffer"]
        self._sharded = [
            ShardedSlot(f"optimizer/{SLOTS[key]}", False, partial(self._slot_of, key))
            for key in (["exp_avg", "exp_avg_sq"] if self._count_names else momentum)
        ]
        if ema.is_kept:
            self._sharded.append(ShardedSlot(PREFIX, True, ema.of))
        self._entries = [entry for entry in model.entries if entry.trainable]

    def broadcast_optimizers(self, workers: Workers, root: int) -> None:
        """Do nothing: every worker has its own part, which is zero when a job begins."""

    def check(self) -> None:
        """Do nothing: everything that hvdtrain's optimizers keep can be saved."""

    def _slot_of(self, key: str, segment: OwnSegment) -> torch.Tensor:
        value: torch.Tensor = self._optimizer.state[segment.tensor][key]
        return value

    def _fields(self, slot: ShardedSlot) -> Iterator[Field]:
        trainable = {id(entry.tensor) for entry in self._entries}
        for field in self.model.fields:
            known = [id(tensor) in trainable for tensor in field.tensors]
            if slot.is_ema and any(known):
                yield replace(field, prefix=slot.prefix)
            elif not slot.is_ema and all(known):
                layout = field.layout.of_slots or field.layout
                yield replace(field, prefix=slot.prefix, layout=layout, torch_names=())

    def _arrays(self, field: Field, values: Mapping[int, torch.Tensor]) -> Iterable[tuple[str, Any]]:
        return field.arrays(values.get(id(tensor), tensor) for tensor in field.tensors)

    def _fill(self, field: Field, values: Mapping[int, torch.Tensor], state: PortableState) -> None:
        tensors = tuple(values.get(id(t), torch.empty_like(t)) for t in field.tensors)
        replace(field, tensors=tensors).write(state)

    def _scatter_counts(self, state: PortableState) -> None:
        if not self._count_names:
            return
        last = state.get(_STEP, np.asarray(0))
        names = [f"{PRIVATE['torch']}{_STEP}/{entry.path}" for entry in self._entries]
        counts = torch.tensor([state.get(name, last).item() for name in names], dtype=torch.float64)
        found = hvd.broadcast(counts, 0, name="hvdtrain.step_counts").tolist()
        by_tensor = {id(entry.tensor): count for entry, count in zip(self._entries, found, strict=True)}
        for segment in self._shards.segments:
            self._slot_of("step", segment).fill_(by_tensor[id(segment.entry.tensor)])

    def _gather_counts(self) -> PortableState:
        # the owner of a parameter's first number knows its count
        if not self._count_names:
            return {}
        firsts = [segment for segment in self._shards.segments if segment.begin == 0]
        own = {id(segment.entry.tensor): self._slot_of("step", segment).item() for segment in firsts}
        counts = torch.tensor([own.get(id(e.tensor), 0.0) for e in self._entries], dtype=torch.float64)
        found = hvd.allreduce(counts, op=hvd.Sum, name="hvdtrain.step_counts").tolist()
        last = max(found)
        state: PortableState = {_STEP: np.asarray(int(last), np.int64)}
        for entry, count in zip(self._entries, found, strict=True):
            if count != last and entry.tensor.numel():
                state[f"{PRIVATE['torch']}{_STEP}/{entry.path}"] = np.asarray(count)
        return state
