"""PyTorch optimizers as portable state, and the state of a whole job: loading and snapshots.

``tensorflow/optimizer_state.py`` does the same for Keras; the rules are in ``portable/names.py``.
"""

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hvdtrain.backends.base import PortableState
from hvdtrain.backends.portable.ema import has_ema
from hvdtrain.backends.portable.names import PRIVATE, check_state, check_unique
from hvdtrain.backends.torch.ema import ExponentialMovingAverage
from hvdtrain.backends.torch.layouts import SAME
from hvdtrain.backends.torch.model_state import Entry, Field, ModelState, TorchSnapshot
from hvdtrain.errors import TaskError

# PyTorch's optimizer slots, by the names that Keras twins use
_SLOTS = {"momentum_buffer": "momentum", "exp_avg": "first_moment", "exp_avg_sq": "second_moment"}
_STEP = "optimizer/step"
_OWN_STEPS = f"{PRIVATE['torch']}optimizer/step/"


@dataclass(frozen=True)
class _Number:
    """A number in an optimizer's state that is no tensor, or a count of steps.

    Attributes:
        name: its name in the portable state.
        slots: the parameter's part of the optimizer's state.
        key: its name there.
    """

    name: str
    slots: dict[str, Any]
    key: str

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


class TrainingState:
    """Model and optimizer as portable state.

    Args:
        model: the model's tensors.
        optimizer: the task's or one of hvdtrain's.
        ema: the moving average of the weights; none if not given.
    """

    def __init__(
        self,
        model: ModelState,
        optimizer: torch.optim.Optimizer,
        ema: ExponentialMovingAverage | None = None,
    ) -> None:
        self.model = model
        self.ema = ema or ExponentialMovingAverage(model, None)
        self._optimizer = optimizer
        # optimizers of tasks make their slots in their first step
        self._starts_empty = not self.has_slots()

    def check(self) -> None:
        """Check that everything the optimizer keeps can be saved.

        Raises:
            TaskError: naming what cannot.
        """
        known = {id(entry.tensor): entry.path for entry in self.model.entries}
        for parameter, slots in self._optimizer.state.items():
            if not isinstance(parameter, torch.Tensor) or id(parameter) not in known:
                where = "another tensor" if isinstance(parameter, torch.Tensor) else repr(parameter)
                raise _cannot_be_saved(self._optimizer, f"it keeps something for {where}, no parameter")
            for key, value in slots.items():
                if not isinstance(value, torch.Tensor | int | float | np.number | None):
                    found = f"{key!r} of {known[id(parameter)]} is a {type(value).__name__}"
                    raise _cannot_be_saved(self._optimizer, found)

    def snapshot(self) -> TorchSnapshot:
        """Copy everything off the device.

        Raises:
            TaskError: If the optimizer's state cannot be saved.
        """
        self.check()
        state: PortableState = {n.name: np.asarray(n.value) for n in self._numbers()}
        counts = self._step_counts()
        if counts:
            last = max(count.value for count in counts)
            state[_STEP] = np.asarray(int(last), np.int64)
            state |= {n.name: np.asarray(n.value) for n in counts if n.value != last}
        slots = list(self._slot_fields())
        check_unique((field.name, field.name) for field in slots)
        return TorchSnapshot([*self.model.fields, *self.ema.fields, *slots], state)

    def load(self, state: PortableState) -> None:
        """Load portable state, having checked all of it.

        A moving average that is not in it starts anew.

        Raises:
            TaskError: If the state does not fit, or the optimizer's cannot be made.
        """
        ema_fields = self.ema.fields if has_ema(state) else []
        saved_slots = any(name.startswith("optimizer/") for name in state)
        made = self._starts_empty and saved_slots and not self.has_slots()
        emptied = self._starts_empty and not saved_slots
        try:
            if made:
                self.make_slots()
            own_names = {field.name: f"model/{field.own}" for field in self.model.fields}
            shapes = {field.name: field.shape for field in ema_fields} | self._shapes(with_slots=not emptied)
            check_state(shapes, state, "torch", own_names)
        except TaskError:
            if made:
                self._optimizer.state.clear()
            raise
        if emptied:
            self._optimizer.state.clear()
        for field in [*self.model.fields, *self._slot_fields(), *ema_fields]:
            field.write(state)
        if not ema_fields:
            self.ema.restart()
        for number in self._numbers():
            number.write(state[number.name].item())
        for count in self._step_counts():
            count.write(state.get(count.name, state[_STEP]).item())

    def follow(self, root_has_slots: bool) -> None:
        """Make or drop this worker's slots, so that it has them where the root has them."""
        if root_has_slots and not self.has_slots():
            self.make_slots()
        elif not root_has_slots and self._starts_empty:
            self._optimizer.state.clear()

    def has_slots(self) -> bool:
        """Return whether the optimizer keeps anything yet."""
        return any(self._optimizer.state.values())

    def make_slots(self) -> None:
        """Let the optimizer make its slots, by a step with zero gradients that changes nothing else.

        So the optimizer itself says which of them are tensors, and of which kind and device.

        Raises:
            TaskError: If the optimizer takes no such step.
        """
        optimizer = self._optimizer
        groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        before = [(p, p.detach().clone(), p.grad) for p in parameters]
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.requires_grad else None
            if isinstance(optimizer, torch.optim.SparseAdam) and p.grad is not None:
                p.grad = p.grad.to_sparse()
        try:
            optimizer.step()
        except Exception as error:
            raise TaskError(f"the slots of {_kind(optimizer)} cannot be made: {error}") from error
        finally:
            for p, value, gradient in before:
                p.detach().copy_(value)
                p.grad = gradient
            for group, options in zip(optimizer.param_groups, groups, strict=True):
                group.update(options)

    def _shapes(self, with_slots: bool) -> dict[str, tuple[int, ...]]:
        fields = [*self.model.fields, *(self._slot_fields() if with_slots else ())]
        shapes: dict[str, tuple[int, ...]] = {field.name: field.shape for field in fields}
        if with_slots:
            shapes |= {number.name: () for number in self._numbers()}
            shapes |= {_STEP: ()} if self._step_counts() else {}
        return shapes

    def _slot_fields(self) -> Iterator[Field]:
        """Return the slots: those shaped as their parameter share its layout."""
        for field in self.model.fields:
            states = [self._slots_of(tensor) for tensor in field.tensors]
            for key in states[0]:
                values: list[Any] = [slots.get(key) for slots in states]
                if all(_shaped_as(v, t) for v, t in zip(values, field.tensors, strict=True)):
                    layout = field.layout.of_slots or field.layout
                    yield replace(
                        field, tensors=tuple(values), layout=layout, torch_names=(), prefix=_slot(key)
                    )
        for entry, key, value in self._rest():
            if isinstance(value, torch.Tensor):
                yield Field(entry.path, entry.path, (value,), (entry.path,), SAME, prefix=_slot(key))

    def _numbers(self) -> list[_Number]:
        return [
            _Number(f"{_slot(key)}/{entry.path}", self._optimizer.state[entry.tensor], key)
            for entry, key, value in self._rest()
            if not isinstance(value, torch.Tensor)
        ]

    def _rest(self) -> Iterator[tuple[Entry, str, Any]]:
        """Return the slots that are not shaped as their parameter, without counts of steps."""
        for entry in self.model.entries:
            for key, value in self._slots_of(entry.tensor).items():
                if value is not None and not _shaped_as(value, entry.tensor):
                    yield entry, key, value

    def _step_counts(self) -> list[_Number]:
        return [
            _Number(f"{_OWN_STEPS}{entry.path}", slots, "step")
            for entry in self.model.entries
            if "step" in (slots := self._optimizer.state.get(entry.tensor, {}))
        ]

    def _slots_of(self, tensor: torch.Tensor) -> dict[str, Any]:
        """Return a parameter's part of the optimizer's state, without its count of steps."""
        slots = self._optimizer.state.get(tensor, {})
        return {key: value for key, value in slots.items() if key != "step"}


def _cannot_be_saved(optimizer: torch.optim.Optimizer, found: str) -> TaskError:
    return TaskError(
        f"the state of {_kind(optimizer)} cannot be saved: {found}",
        "It may hold tensors and numbers for each parameter; give another optimizer in torch_optimizer().",
    )


def _kind(optimizer: torch.optim.Optimizer) -> str:
    return type(optimizer).__name__


def _slot(key: str) -> str:
    return f"optimizer/{_SLOTS.get(key, key)}"


def _shaped_as(value: Any, tensor: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == tensor.shape


def fill_slots(optimizer: torch.optim.Optimizer) -> None:
    """Make the slots of hvdtrain's optimizers as zeros, so that there is a state to broadcast."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if "betas" in group:
                optimizer.state[parameter] = {
                    # where the operation that computes with it runs
                    "step": torch.zeros((), device=parameter.device if group.get("fused") else "cpu"),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
            elif group["momentum"]:
                optimizer.state[parameter] = {"momentum_buffer": torch.zeros_like(parameter)}
