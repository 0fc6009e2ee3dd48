"""The moving average of the weights, and what an elastic job's step changes early; as in ``tensorflow/``."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hvdtrain.backends.portable.initial_values import PREFIX, share_of_new
from hvdtrain.backends.torch.state.model_state import Entry, Field, ModelState
from hvdtrain.backends.torch.state.tensors import address_of, set_values


class ExponentialMovingAverage:
    """The average of every trainable tensor, not of buffers; of none where there is no decay."""

    def __init__(self, model: ModelState, decay: float | None) -> None:
        self.decay = decay or 0.0
        entries = [entry for entry in model.entries if entry.trainable and decay is not None]
        self._weights = [entry.tensor.detach() for entry in entries]
        self._averages = [weight.clone() for weight in self._weights]
        self.paths = [entry.path for entry in entries]
        known = {id(entry.tensor): a for entry, a in zip(entries, self._averages, strict=True)}
        self.fields: list[Field] = [
            replace(field, tensors=tuple(known.get(id(t), t) for t in field.tensors), prefix=PREFIX)
            for field in model.fields
            if any(id(t) in known for t in field.tensors)
        ]

    def renewed(self, model: ModelState) -> "ExponentialMovingAverage":
        """Return the average of the tensors that are trainable now; what is new starts from its weights."""
        found = ExponentialMovingAverage(model, self.decay or None)
        known = dict(zip(self.paths, self._averages, strict=True))
        for path, average in zip(found.paths, found._averages, strict=True):
            average.copy_(known.get(path, average))
        return found

    def share(self, step: int) -> float:
        """Return the part of the average that a step's weights make up."""
        return share_of_new(step, self.decay)

    def update(self, share: float) -> None:
        """Take in the weights that a step has given, as that part of the average."""
        if self._averages:
            torch._foreach_lerp_(self._averages, self._weights, share)

    def restart(self) -> None:
        """Start from the weights as they are."""
        if self._averages:
            torch._foreach_copy_(self._averages, self._weights)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Return a context in which the model's weights are the averages."""
        if not self._averages:
            yield
            return
        own = [weight.clone() for weight in self._weights]
        torch._foreach_copy_(self._weights, self._averages)
        try:
            yield
        finally:
            torch._foreach_copy_(self._weights, own)

    def to_broadcast(self) -> list[torch.Tensor]:
        """Return the averages as Horovod broadcasts them."""
        return self._averages

    def follow_broadcast(self) -> None:
        """Follow weights that were broadcast; the averages were broadcast with them."""


class MovingState:
    """The values before a step of what a forward pass and some optimizers change while it may still fail."""

    def __init__(
        self,
        model: nn.Module,
        trainable: Sequence[Entry],
        optimizers: Sequence[torch.optim.Optimizer] = (),
        is_changing: Callable[[torch.Tensor], bool] = lambda _: False,
        device: str | None = None,
    ) -> None:
        self._model, self._optimizers, self._is_changing = model, optimizers, is_changing
        self._device = device  # where the copies are; where the tensors are if it is None
        self._own = {id(entry.tensor) for entry in trainable}
        self._states: list[tuple[torch.optim.Optimizer, dict[Any, Any]]] = []
        self._holders: list[tuple[dict[Any, Any], dict[Any, Any]]] = []  # mappings, and what they held
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # tensors and their values
        self._marks: dict[int, object] = {}  # of frozen parameters, by which most changes are seen

    @torch.no_grad()
    def keep(self) -> None:
        """Copy what the step may change. Local: no collective."""
        self._states = [(optimizer, dict(optimizer.state)) for optimizer in self._optimizers]
        holders: list[Any] = [module._buffers for module in self._model.modules()]
        for optimizer, slots in self._states:
            holders += [*optimizer.param_groups, *slots.values()]
        self._holders = [(holder, dict(holder)) for holder in holders]
        tensors = [t for _, held in self._holders for t in held.values() if isinstance(t, torch.Tensor)]
        for parameter in self._model.parameters():
            if self._optimizers if id(parameter) in self._own else self._has_moved(parameter):
                tensors.append(parameter)
        before, self._copies = self._copies, {}
        kinds: dict[Any, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for tensor in tensors:
            known, copy = before.get(id(tensor), (None, tensor))
            is_dense = tensor.layout is torch.strided and not tensor.is_inference()
            is_alike = is_dense and copy.shape == tensor.shape and copy.dtype is tensor.dtype
            if known is not tensor or not is_alike:
                copy = tensor.detach().to(self._device or tensor.device, copy=True)
            else:  # those of one kind at once, into the memory of the copies before
                copies, sources = kinds.setdefault((tensor.dtype, tensor.device), ([], []))
                copies.append(copy)
                sources.append(tensor.detach())
            self._copies[id(tensor)] = tensor, copy
        for copies, sources in kinds.values():
            torch._foreach_copy_(copies, sources)

    def restore(self) -> None:
        """Make everything as it was when ``keep`` was called last. Local: no collective."""
        for holder, held in [*((one.state, slots) for one, slots in self._states), *self._holders]:
            holder.clear()
            holder.update(held)
        for tensor, copy in self._copies.values():
            set_values(tensor, copy)

    def _has_moved(self, frozen: torch.Tensor) -> bool:
        """Return whether a step has ever changed a frozen parameter."""
        mark = None if frozen.is_inference() else (address_of(frozen), frozen._version)
        if self._is_changing(frozen) or self._marks.setdefault(id(frozen), mark) != mark:
            self._marks[id(frozen)] = None  # which no mark is equal to
        return self._marks[id(frozen)] is None
