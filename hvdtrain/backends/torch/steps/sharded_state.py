"""Sharded state in PyTorch as portable state: gathered part by part on rank 0, and given out again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.portable.initial_values import PREFIX
from hvdtrain.backends.portable.names import PRIVATE, check_unique
from hvdtrain.backends.portable.training_state import CommonShardedState, ShardedSlot, Spool
from hvdtrain.backends.records import PortableState
from hvdtrain.backends.torch.reduction.sharded_parameters import (
    Bucket,
    OwnSegment,
    ShardedParameters,
    memory_of,
)
from hvdtrain.backends.torch.state.ema import ExponentialMovingAverage
from hvdtrain.backends.torch.state.model_state import Entry, Field, ModelState
from hvdtrain.backends.torch.steps.optimizer_state import SLOTS, TrainingState
from hvdtrain.backends.torch.steps.sharded_optimizer import ShardedMovingAverage
from hvdtrain.workers.agreement import Workers

_STEP = "optimizer/step"


class ShardedState(CommonShardedState, TrainingState):
    """Model and sharded optimizer as portable state.

    Args:
        model: the model's tensors.
        optimizer: one of hvdtrain's, over this worker's segments.
        ema: the moving average of the weights.
        shards: the parameters.
    """

    def __init__(
        self,
        model: ModelState,
        optimizer: torch.optim.Optimizer,
        ema: ShardedMovingAverage,
        shards: ShardedParameters,
    ) -> None:
        super().__init__(model, {}, ema)
        self._optimizer = optimizer
        self._shards = shards
        group = optimizer.param_groups[0]
        self._counts_steps = "betas" in group
        keys = (
            ["exp_avg", "exp_avg_sq"]
            if self._counts_steps
            else ["momentum_buffer"]
            if group["momentum"]
            else []
        )
        self._sharded = [ShardedSlot(f"optimizer/{SLOTS[key]}", False, self._reader_of(key)) for key in keys]
        if ema.is_kept:
            self._sharded.append(ShardedSlot(PREFIX, True, lambda segment: ema.of_segment[id(segment)]))
        self._count_names = [_STEP] if self._counts_steps else []
        self._entries = [entry for entry in model.entries if entry.trainable]

    def broadcast_optimizers(self, workers: Workers, root: int) -> None:
        """Do nothing: every worker has its own part, which is zero when a job begins."""

    def broadcast_ema(self, root: int) -> None:
        """Start the moving average from the weights, which are the root's."""
        self.ema.restart()

    def check(self) -> None:
        """Do nothing: everything that hvdtrain's optimizers keep can be saved."""

    def _reader_of(self, key: str) -> Callable[[OwnSegment], torch.Tensor]:
        def read(segment: OwnSegment) -> torch.Tensor:
            value: torch.Tensor = self._optimizer.state[segment.tensor][key]
            return value

        return read

    def _fields(self, slot: ShardedSlot) -> list[Field]:
        trainable = {id(entry.tensor) for entry in self._entries}
        found = []
        for field in self.model.fields:
            known = [id(tensor) in trainable for tensor in field.tensors]
            if slot.is_ema and any(known):
                found.append(replace(field, prefix=slot.prefix))
            elif not slot.is_ema and all(known):
                layout = field.layout.of_slots or field.layout
                found.append(replace(field, prefix=slot.prefix, layout=layout, torch_names=()))
        return found

    def _fill(self, bucket: Bucket, flat: torch.Tensor, slot: ShardedSlot, state: PortableState) -> None:
        """Write a slot's values of a bucket into a vector."""
        views = dict(zip(map(_key, bucket.entries), bucket.views(flat), strict=True))
        for field in self._fields(slot):
            if any(id(tensor) in views for tensor in field.tensors):
                tensors = tuple(views.get(id(t), torch.empty_like(t)) for t in field.tensors)
                replace(field, tensors=tensors).write(state)

    def _scatter(self, slot: ShardedSlot, state: PortableState) -> None:
        self._shards.scatter_from_root(
            lambda bucket, flat: self._fill(bucket, flat, slot, state),
            lambda segment, values: slot.of(segment).copy_(values),
            f"slot.{slot.prefix}",
        )

    def _scatter_counts(self, state: PortableState) -> None:
        if self._counts_steps:
            counts = [float(self._count_in(state, entry)) for entry in self._entries]
            found = hvd.broadcast(torch.tensor(counts, dtype=torch.float64), 0, name="hvdtrain.step_counts")
            self._set_counts(found)

    def _make_room(self, spool: Spool) -> dict[tuple[int, int], torch.Tensor]:
        return {
            (number, bucket.number): _tensor(spool, bucket.layout.length, bucket.entries[0].tensor.dtype)
            for number in range(len(self._sharded))
            for bucket in self._shards.buckets
        }

    def _put(
        self, room: dict[tuple[int, int], torch.Tensor], number: int, bucket: Bucket, flat: torch.Tensor
    ) -> None:
        room[number, bucket.number].copy_(flat)

    def _gathered(
        self, kept: PortableState, room: dict[tuple[int, int], torch.Tensor], spool: Spool
    ) -> "ShardedSnapshot":
        fields = []
        for number, slot in enumerate(self._sharded):
            views: dict[int, torch.Tensor] = {}
            for bucket in self._shards.buckets:
                values = bucket.views(room[number, bucket.number])
                views |= dict(zip(map(_key, bucket.entries), values, strict=True))
            fields += [
                replace(field, tensors=tuple(views.get(id(t), t.detach()) for t in field.tensors))
                for field in self._fields(slot)
            ]
        check_unique((field.name, field.name) for field in fields)
        copies = self._model_copies(spool)
        fields += [replace(f, tensors=tuple(copies[id(t)] for t in f.tensors)) for f in self.model.fields]
        return ShardedSnapshot(fields, kept, spool)

    def _model_copies(self, spool: Spool) -> dict[int, torch.Tensor]:
        copies: dict[int, torch.Tensor] = {}
        for field in self.model.fields:
            for tensor in field.tensors:
                if id(tensor) not in copies:
                    room = _tensor(spool, tensor.numel(), tensor.dtype)
                    copies[id(tensor)] = room.view(tensor.shape).copy_(tensor.detach())
        return copies

    def _count_in(self, state: PortableState, entry: Entry) -> Any:
        last = state.get(_STEP, np.asarray(0))
        return state.get(f"{PRIVATE['torch']}{_STEP}/{entry.path}", last).item()

    def _set_counts(self, counts: torch.Tensor) -> None:
        by_tensor = {id(e.tensor): count for e, count in zip(self._entries, counts.tolist(), strict=True)}
        for segment in self._shards.segments:
            self._optimizer.state[segment.tensor]["step"].fill_(by_tensor[id(segment.entry.tensor)])

    def _gather_counts(self) -> PortableState:
        # the owner of a parameter's first number knows its count
        if not self._counts_steps:
            return {}
        own = {
            id(segment.entry.tensor): self._optimizer.state[segment.tensor]["step"].item()
            for segment in self._shards.segments
            if segment.begin == 0
        }
        counts = torch.tensor(
            [own.get(id(entry.tensor), 0.0) for entry in self._entries], dtype=torch.float64
        )
        found = hvd.allreduce(counts, op=hvd.Sum, name="hvdtrain.step_counts").tolist()
        last = max(found)
        state: PortableState = {_STEP: np.asarray(int(last), np.int64)}
        for entry, count in zip(self._entries, found, strict=True):
            if count != last and entry.tensor.numel():
                state[f"{PRIVATE['torch']}{_STEP}/{entry.path}"] = np.asarray(count)
        return state


class ShardedSnapshot:
    """A copy of a whole state on its way to portable state.

    Args:
        fields: the portable arrays to make, over tensors in the spool.
        numbers: arrays that are ready.
        spool: where arrays lie whose numbers are not in the order of a tensor's.
    """

    def __init__(self, fields: Sequence[Field], numbers: PortableState, spool: Spool) -> None:
        self._fields = list(fields)
        self._numbers = numbers
        self._spool = spool

    def read(self) -> PortableState:
        """Lay the copies out; may be called once, in another thread.

        Raises:
            OSError: If there is no room to lay it out.
        """
        state: PortableState = dict(self._numbers)
        self._fields.reverse()
        while self._fields:
            field = self._fields.pop()
            for name, array in field.arrays(field.tensors):
                is_spooled = any(np.may_share_memory(array, _memory(t)) for t in field.tensors)
                state[name] = array if is_spooled else self._spool.keep(array)
        return state


def _memory(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    memory: np.ndarray[Any, Any] = memory_of(tensor).view(torch.uint8).numpy()
    return memory


def _tensor(spool: Spool, numbers: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a vector on the host, whose memory a spool makes."""
    return torch.from_numpy(spool.empty((numbers * dtype.itemsize,), np.uint8)).view(dtype)


def _key(entry: Entry) -> int:
    return id(entry.tensor)


def make_state(
    model: ModelState,
    optimizers: Mapping[str, torch.optim.Optimizer],
    ema: ExponentialMovingAverage,
    local: Any,
    shards: ShardedParameters | None,
) -> TrainingState:
    """Return a job's state.

    Args:
        model: the model's tensors.
        optimizers: by name.
        ema: the moving average of the weights.
        local: the local steps; None if there are none.
        shards: the parameters; None if each worker updates all of them.
    """
    if shards is None:
        return TrainingState(model, optimizers, ema, local)
    assert isinstance(ema, ShardedMovingAverage)
    return ShardedState(model, optimizers[MAIN], ema, shards)
