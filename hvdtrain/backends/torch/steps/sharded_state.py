"""Sharded state in PyTorch as portable state: gathered part by part on rank 0, and given out again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.backends.optimizers import MAIN
from hvdtrain.backends.portable.initial_values import PREFIX, has_ema
from hvdtrain.backends.portable.names import PRIVATE, check_unique
from hvdtrain.backends.portable.training_state import Spool
from hvdtrain.backends.records import PortableState, StateArrays
from hvdtrain.backends.torch.reduction.local_steps import LocalSteps
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
from hvdtrain.backends.workers import peer_errors
from hvdtrain.workers.agreement import Workers

_STEP = "optimizer/step"


@dataclass(frozen=True)
class _Slot:
    """What every number of the parameters has one of.

    Attributes:
        prefix: what stands before the parameter in its portable name.
        is_ema: whether it is the moving average.
        of: returns this worker's part of it.
    """

    prefix: str
    is_ema: bool
    of: Callable[[OwnSegment], torch.Tensor]


class ShardedState(TrainingState):
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
        self._slots = [_Slot(f"optimizer/{SLOTS[key]}", False, self._reader_of(key)) for key in keys]
        if ema.is_kept:
            self._slots.append(_Slot(PREFIX, True, lambda segment: ema.of_segment[id(segment)]))
        self._entries = [entry for entry in model.entries if entry.trainable]

    def load(self, state: StateArrays) -> None:
        """Check a whole portable state, and load the model's part of it; ``distribute`` gives out the rest.

        Raises:
            TaskError: If the state does not fit.
        """
        shapes = self.weight_shapes()
        for slot in self._slots:
            if not slot.is_ema or has_ema(state):
                shapes |= {field.name: field.shape for field in self._fields(slot)}
        if self._counts_steps:
            shapes[_STEP] = ()
        self.check_fits(shapes, state)
        for field in self.model.fields:
            field.write(state)
        self.ema.restart()

    def distribute(self, state: PortableState | None) -> None:
        """Collective. Give every worker its part of the optimizer's slots and of the moving average.

        Args:
            state: the state on rank 0, which ``load`` has checked; not looked at on other ranks.
        """
        workers = self._shards.workers
        given = state if workers.rank == 0 and state is not None else {}
        with_ema = workers.broadcast_object(has_ema(given))
        with peer_errors():
            for slot in self._slots:
                if slot.is_ema and not with_ema:
                    self.ema.restart()
                    continue
                self._shards.scatter_from_root(
                    lambda bucket, flat, slot=slot: self._fill(bucket, flat, slot, given),  # type: ignore[misc]
                    lambda segment, values, slot=slot: slot.of(segment).copy_(values),  # type: ignore[misc]
                    f"slot.{slot.prefix}",
                )
            if self._counts_steps:
                counts = [float(self._count_in(given, entry)) for entry in self._entries]
                found = hvd.broadcast(
                    torch.tensor(counts, dtype=torch.float64), 0, name="hvdtrain.step_counts"
                )
                self._set_counts(found)

    def gather(self, kept: PortableState, folder: Path | None, is_root: bool) -> "ShardedSnapshot | None":
        """Collective. Copy the model, and what all workers keep, for rank 0 to read in another thread.

        Args:
            kept: what else belongs to the state, as arrays.
            folder: where the copy lies; in memory if None.
            is_root: whether this is rank 0.
        """
        spool, error = Spool(None), None
        room: dict[tuple[int, int], torch.Tensor] = {}
        if is_root:
            try:
                spool = Spool(folder)
                room = self._make_room(spool)
            except OSError as found:  # such as no room on the disk
                error = found
        if not self._shards.workers.broadcast_object(error is None):
            return ShardedSnapshot([], {}, spool, error) if is_root else None
        with peer_errors():
            for number, slot in enumerate(self._slots):
                for bucket, flat in self._shards.gather_on_root(slot.of, f"state.{number}"):
                    if is_root:
                        room[number, bucket.number].copy_(flat)
            counts = self._gather_counts()
        if not is_root:
            return None
        fields = [
            field for number, slot in enumerate(self._slots) for field in self._gathered(number, slot, room)
        ]
        check_unique((field.name, field.name) for field in fields)
        copies = self._model_copies(spool)
        fields += [replace(f, tensors=tuple(copies[id(t)] for t in f.tensors)) for f in self.model.fields]
        return ShardedSnapshot(fields, kept | counts, spool)

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

    def _fields(self, slot: _Slot) -> list[Field]:
        """Return a slot's portable arrays, with the parameters in place of its tensors."""
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

    def _fill(self, bucket: Bucket, flat: torch.Tensor, slot: _Slot, state: PortableState) -> None:
        """Write a slot's values of a bucket into a vector."""
        views = dict(zip(map(_key, bucket.entries), bucket.views(flat), strict=True))
        for field in self._fields(slot):
            if any(id(tensor) in views for tensor in field.tensors):
                tensors = tuple(views.get(id(t), torch.empty_like(t)) for t in field.tensors)
                replace(field, tensors=tensors).write(state)

    def _make_room(self, spool: Spool) -> dict[tuple[int, int], torch.Tensor]:
        """Make vectors for each slot of each bucket."""
        return {
            (number, bucket.number): _tensor(spool, bucket.layout.length, bucket.entries[0].tensor.dtype)
            for number in range(len(self._slots))
            for bucket in self._shards.buckets
        }

    def _gathered(self, number: int, slot: _Slot, room: dict[tuple[int, int], torch.Tensor]) -> list[Field]:
        """Return a slot's portable arrays, with what all workers have of it."""
        views: dict[int, torch.Tensor] = {}
        for bucket in self._shards.buckets:
            values = bucket.views(room[number, bucket.number])
            views |= dict(zip(map(_key, bucket.entries), values, strict=True))
        return [
            replace(field, tensors=tuple(views.get(id(t), t.detach()) for t in field.tensors))
            for field in self._fields(slot)
        ]

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
        """Collective. Return the counts of steps, which the owner of a parameter's first number knows."""
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
        error: why there is no copy, if there is none.
    """

    def __init__(
        self, fields: Sequence[Field], numbers: PortableState, spool: Spool, error: OSError | None = None
    ) -> None:
        self._fields = list(fields)
        self._numbers = numbers
        self._spool = spool
        self._error = error

    def read(self) -> PortableState:
        """Lay the copies out; may be called once, in another thread.

        Raises:
            OSError: If there is no copy, or no room to lay it out.
        """
        if self._error is not None:
            raise self._error
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
    local: LocalSteps | None,
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
