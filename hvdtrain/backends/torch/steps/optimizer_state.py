"""PyTorch optimizers as portable state, and the state of a whole job: loading and snapshots."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.portable.names import PRIVATE
from hvdtrain.backends.portable.training_state import CommonOptimizerState, CommonState
from hvdtrain.backends.records import PortableState, Shapes, StateArrays
from hvdtrain.backends.torch.reduction.broadcast import broadcast_optimizer
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

    def count_names(self) -> list[str]:
        """Return the names of counts of steps that differ from the others."""
        return [count.name for count in self._step_counts()]

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
        free = {
            field.name: tuple(state[field.name].shape)
            for field in self.model.fields
            if field.resizes and field.name in state
        }
        super().check_fits(
            {**shapes, **{name: shape for name, shape in free.items() if name in shapes}}, state
        )

    def private_names(self) -> list[str]:
        """Return the names of arrays that only PyTorch reads, and which a state may have."""
        fields = [*self.model.fields, *self.ema.fields, *self._slots]
        own = [name for field in fields for name in field.private_names]
        return own + [name for part in self._parts for name in part.count_names()]

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
