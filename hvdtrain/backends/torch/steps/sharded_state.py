"""Sharded state in PyTorch as portable state: gathered part by part on rank 0, and given out again."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

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
from hvdtrain.backends.torch.state.model_state import Entry, Field, ModelState
from hvdtrain.backends.torch.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.torch.steps.optimizer_state import SLOTS, TrainingState
from hvdtrain.backends.torch.steps.optimizers import LAMB, LARS, Group, Tensors
from hvdtrain.backends.workers import peer_errors
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers


def shard_optimizer(optimizer: torch.optim.Optimizer, shards: ShardedParameters | None) -> None:
    """Let an optimizer of hvdtrain's that has made no slots yet update this worker's segments.

    Its groups stay, also those of which this worker owns nothing.
    """
    if shards is None:
        return
    owned: dict[int, list[OwnSegment]] = {}
    for segment in shards.segments:
        owned.setdefault(id(segment.entry.tensor), []).append(segment)
    for group in optimizer.param_groups:
        parameters = group["params"]
        if "parts" in group:
            _cut_parts(group, owned)
        group["params"] = [s.tensor for parameter in parameters for s in owned.get(id(parameter), ())]
    if isinstance(optimizer, LARS | LAMB):
        optimizer.norms = SharedNorms(shards.workers)


def _cut_parts(group: Group, owned: dict[int, list[OwnSegment]]) -> None:
    """Divide the parts that have norms of their own as the parameters are divided, and number them."""
    numbers, cut, count = [], [], 0
    for parameter, parts in zip(group["params"], group["parts"], strict=False):
        if len(parts) > 1 and not parameter.is_contiguous():
            raise TaskError(
                f"a parameter of shape {tuple(parameter.shape)} holds {len(parts)} matrices that do not lie "
                "one after the other in memory, and with shard their norms cannot be computed",
                "Make it contiguous, leave shard out, or use adamw or sgd.",
            )
        row = parameter.numel() // max(1, len(parameter))
        for segment in owned.get(id(parameter), ()):
            own, its_numbers = [], []
            for number, (start, stop) in enumerate(parts, count):
                first, last = max(start * row, segment.begin), min(stop * row, segment.end)
                if first < last:
                    own.append((first - segment.begin, last - segment.begin))
                    its_numbers.append(number)
            cut.append(tuple(own))
            numbers.append(its_numbers)
        count += len(parts)
    group["parts"], group["part_numbers"], group["part_count"] = tuple(cut), tuple(numbers), count


class SharedNorms:
    """The norms of parameters of which each worker has a part."""

    def __init__(self, workers: Workers) -> None:
        self._workers = workers

    def __call__(self, group: Group, weights: Tensors, others: Tensors) -> tuple[torch.Tensor, torch.Tensor]:
        """Collective. Return the norms over all workers of what this worker has parts of."""
        squares = torch.zeros(2, group["part_count"], dtype=torch.float64)
        of_parameters = zip(group["params"], group["part_numbers"], strict=True)
        own = [number for p, numbers in of_parameters if p.grad is not None for number in numbers]
        numbers = torch.tensor(own, dtype=torch.int64)
        if weights:
            for row, tensors in zip(squares, (weights, others), strict=True):
                row.index_add_(0, numbers, _squared_norms(tensors).cpu())
        squares = hvd.allreduce(squares, op=hvd.Sum, name="hvdtrain.norms")
        kind = weights[0] if weights else squares
        found = squares.sqrt()[:, numbers].to(dtype=kind.dtype, device=kind.device)
        return found[0], found[1]


def _squared_norms(tensors: Tensors) -> torch.Tensor:
    """Return the squares of the norms of tensors, in fp64."""
    return torch.stack([tensor.to(torch.float64).square().sum() for tensor in tensors])


class ShardedMovingAverage(ExponentialMovingAverage):
    """The moving average of this worker's part of the weights."""

    def __init__(self, model: ModelState, decay: float | None, shards: ShardedParameters) -> None:
        super().__init__(model, None)
        self.decay = decay or 0.0
        self._shards = shards
        segments = shards.segments if decay is not None else []
        self._weights = [segment.tensor for segment in segments]
        self._averages = [weight.clone() for weight in self._weights]
        self._paths = [f"{segment.entry.path}.{segment.begin}" for segment in segments]
        self.of_segment = {
            id(segment): average for segment, average in zip(segments, self._averages, strict=True)
        }
        self.is_kept = decay is not None

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Collective. Return a context in which the model's weights are the averages of all workers."""
        if not self.is_kept:
            yield
            return
        entries = [entry for bucket in self._shards.buckets for entry in bucket.entries]
        own = [entry.tensor.detach().clone() for entry in entries]
        with peer_errors():
            self._shards.gather(lambda segment: self.of_segment[id(segment)], "ema")
        try:
            yield
        finally:
            with torch.no_grad():
                torch._foreach_copy_([entry.tensor.detach() for entry in entries], own)


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
    """A copy of a whole state on its way to portable state."""

    def __init__(self, fields: Sequence[Field], numbers: PortableState, spool: Spool) -> None:
        self._fields = list(fields)
        self._numbers = numbers
        self._spool = spool

    def read(self) -> PortableState:
        """Lay the copies out; may be called once, in another thread."""
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
