"""PyTorch optimizers as portable state, and the state of a whole job, on each worker or in parts on each."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import horovod.torch as hvd
import numpy as np
import torch

from hvdtrain.backends.portable.initial_values import PREFIX
from hvdtrain.backends.portable.names import PRIVATE
from hvdtrain.backends.portable.training_state import (
    CommonOptimizerState,
    CommonShardedState,
    CommonState,
    ShardedSlot,
)
from hvdtrain.backends.records import PortableState, Shapes, StateArrays
from hvdtrain.backends.reduction.shards import CommonShardedAverage, OwnSegment
from hvdtrain.backends.torch.reduction.broadcast import broadcast_optimizer
from hvdtrain.backends.torch.reduction.sharded_parameters import ShardedParameters
from hvdtrain.backends.torch.state.layouts import SAME
from hvdtrain.backends.torch.state.model_state import Entry, Field, ModelState, TorchSnapshot
from hvdtrain.backends.torch.state.moving_state import ExponentialMovingAverage
from hvdtrain.backends.torch.state.tensors import make_slots
from hvdtrain.errors import TaskError
from hvdtrain.workers.agreement import Workers

# PyTorch's optimizer slots, by the names that Keras twins use
SLOTS = {"momentum_buffer": "momentum", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}


@dataclass(frozen=True)
class _Number:
    """A number in an optimizer's state that is no tensor, or a count of steps."""

    name: str  # its name in the portable state
    slots: dict[str, Any]  # the parameter's part of the optimizer's state
    key: str  # its name there

    @property
    def value(self) -> Any:
        """The number as Python has it."""
        value = self.slots[self.key]
        return value.item() if isinstance(value, torch.Tensor) else value

    def write(self, value: Any) -> None:
        """Set it, as the kind of number or tensor that it is."""
        now = self.slots[self.key]
        if isinstance(now, torch.Tensor):
            now.fill_(value)
        else:
            self.slots[self.key] = type(now)(value)


class OptimizerState(CommonOptimizerState):
    """One optimizer as portable state."""

    optimizer: torch.optim.Optimizer

    def __init__(self, model: ModelState, optimizer: torch.optim.Optimizer, prefix: str) -> None:
        super().__init__(model, optimizer, prefix)
        self.starts_empty = not self.has_slots()

    def check(self) -> None:
        """Check that everything the optimizer keeps can be saved."""
        known = {id(entry.tensor): entry.path for entry in self._model.entries}
        for parameter, slots in self.optimizer.state.items():
            if not isinstance(parameter, torch.Tensor) or id(parameter) not in known:
                where = "another tensor" if isinstance(parameter, torch.Tensor) else repr(parameter)
                raise _cannot_be_saved(self.optimizer, f"it keeps something for {where}, no parameter")
            for key, value in slots.items():
                if not isinstance(value, torch.Tensor | int | float | np.number | None):
                    found = f"{key!r} of {known[id(parameter)]} is a {type(value).__name__}"
                    raise _cannot_be_saved(self.optimizer, found)

    def values(self) -> PortableState:
        """Return the numbers that are no tensors, and the counts of steps."""
        state: PortableState = {n.name: np.asarray(n.value) for n in self._numbers()}
        counts = self._step_counts()
        if counts:
            last = max(count.value for count in counts)
            state[self._step] = np.asarray(int(last), np.int64)
            state |= {n.name: np.asarray(n.value) for n in counts if n.value != last}
        return state

    def write_numbers(self, state: StateArrays) -> None:
        """Set what ``values`` returns."""
        for number in self._numbers():
            number.write(state[number.name].item())
        counts = self._step_counts()
        last = state[self._step].item() if counts else 0
        for count in counts:
            count.write(state[count.name].item() if count.name in state else last)

    def number_names(self) -> list[str]:
        """Return the names of the numbers that every state has."""
        return [number.name for number in self._numbers()] + [self._step] * bool(self._step_counts())

    def has_slots(self) -> bool:
        """Return whether the optimizer keeps anything yet."""
        return any(self.optimizer.state.values())

    def follow(self, has_slots: bool) -> None:
        """Make or drop the slots, so that there are some where the root has them."""
        if has_slots and not self.has_slots():
            self.make_slots()
        elif not has_slots and self.starts_empty:
            self.clear()

    def clear(self) -> None:
        """Drop everything that the optimizer keeps."""
        self.optimizer.state.clear()

    def make_slots(self, state: StateArrays | None = None) -> None:
        """Let the optimizer make its slots, by a step with zero gradients that changes nothing else."""
        make_slots(self.optimizer)
        if state is None:
            return
        saved = {
            tensor
            for field in self._model.fields
            for tensor in field.tensors
            if any(f"{self._slot(key)}/{field.path}" in state for key in self._slots_of(tensor))
        }
        saved |= {
            entry.tensor for entry, key, _ in self._rest() if f"{self._slot(key)}/{entry.path}" in state
        }
        if saved:
            for tensor in self.optimizer.state.keys() - saved:
                del self.optimizer.state[tensor]

    def slot_fields(self) -> Iterator[Field]:
        """Return the slots: those shaped as their parameter share its layout."""
        for field in self._model.fields:
            states = [self._slots_of(tensor) for tensor in field.tensors]
            for key in states[0]:
                values: list[Any] = [slots.get(key) for slots in states]
                if all(_shaped_as(v, t) for v, t in zip(values, field.tensors, strict=True)):
                    layout = field.layout.of_slots or field.layout
                    yield replace(
                        field, tensors=tuple(values), layout=layout, torch_names=(), prefix=self._slot(key)
                    )
        for entry, key, value in self._rest():
            if isinstance(value, torch.Tensor):
                yield Field(entry.path, entry.path, (value,), (entry.path,), SAME, prefix=self._slot(key))

    def _numbers(self) -> list[_Number]:
        return [
            _Number(f"{self._slot(key)}/{entry.path}", self.optimizer.state[entry.tensor], key)
            for entry, key, value in self._rest()
            if not isinstance(value, torch.Tensor)
        ]

    def _rest(self) -> Iterator[tuple[Entry, str, Any]]:
        """Return the slots that are not shaped as their parameter, without counts of steps."""
        for entry in self._model.entries:
            for key, value in self._slots_of(entry.tensor).items():
                if value is not None and not _shaped_as(value, entry.tensor):
                    yield entry, key, value

    def _step_counts(self) -> list[_Number]:
        return [
            _Number(f"{PRIVATE['torch']}{self._step}/{entry.path}", slots, "step")
            for entry in self._model.entries
            if "step" in (slots := self.optimizer.state.get(entry.tensor, {}))
        ]

    def _slots_of(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's part of the optimizer's state, without its count of steps."""
        slots = self.optimizer.state.get(tensor, {})
        return {key: value for key, value in slots.items() if key != "step"}

    def _slot(self, key: str) -> str:
        return f"{self.prefix}{SLOTS.get(key, key)}"


class TrainingState(CommonState):
    """Model and optimizers as portable state."""

    framework = "torch"
    kinds = OptimizerState, TorchSnapshot, ExponentialMovingAverage
    model: ModelState
    ema: ExponentialMovingAverage

    def check_fits(self, shapes: Shapes, state: StateArrays) -> None:
        """Check as the base does, but for buffers that take the shape of what is loaded."""
        free = {field.name for field in self.model.fields if field.resizes} & shapes.keys() & state.keys()
        super().check_fits({**shapes, **{name: tuple(state[name].shape) for name in free}}, state)

    def private_names(self) -> list[str]:
        """Return the names of arrays that only PyTorch reads, and which a state may have."""
        fields = [*self.model.fields, *self.ema.fields, *self._slots]
        own = [name for field in fields for name in field.private_names]
        return own + [count.name for part in self._parts for count in part._step_counts()]

    def broadcast_optimizers(self, workers: Workers, root: int) -> None:
        """Collective. Copy what the root's optimizers keep to every worker's."""
        # made here: Horovod makes missing slots by a step that moves parameters and options
        has_slots = workers.broadcast_object([part.has_slots() for part in self._parts], root)
        for part, has_some in zip(self._parts, has_slots, strict=True):
            part.follow(has_some)
            if has_some:
                broadcast_optimizer(part.optimizer, workers, root)


def _cannot_be_saved(optimizer: torch.optim.Optimizer, found: str) -> TaskError:
    return TaskError(
        f"the state of {type(optimizer).__name__} cannot be saved: {found}",
        "It may hold tensors and numbers for each parameter; give another optimizer in torch_optimizer().",
    )


def _shaped_as(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


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
