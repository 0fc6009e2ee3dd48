"""The moving average of the weights, and what an elastic job's step changes early; as in ``tensorflow/``."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import nn

from hvdtrain.backends.portable.initial_values import PREFIX, share_of_new
from hvdtrain.backends.torch.state.model_state import Entry, Field, ModelState
from hvdtrain.backends.torch.state.tensors import set_values


class ExponentialMovingAverage:
    """The average of every trainable tensor; of none where there is no decay.

    Buffers, such as the statistics of batch norm, are not averaged: the model's own go with it.

    Args:
        decay: of the average, per step; None where there is none.

    Attributes:
        decay: of the average, per step; 0 where there is none.
    """

    def __init__(self, model: ModelState, decay: float | None) -> None:
        self.decay = decay or 0.0
        entries = [entry for entry in model.entries if entry.trainable and decay is not None]
        self._weights = [entry.tensor.detach() for entry in entries]
        self._averages = [weight.clone() for weight in self._weights]
        self._paths = [entry.path for entry in entries]
        known = {id(entry.tensor): a for entry, a in zip(entries, self._averages, strict=True)}
        self.fields: list[Field] = [
            replace(field, tensors=tuple(known.get(id(t), t) for t in field.tensors), prefix=PREFIX)
            for field in model.fields
            if any(id(t) in known for t in field.tensors)
        ]

    def renewed(self, model: ModelState) -> "ExponentialMovingAverage":
        """Return the average of the tensors that are trainable now; what is new starts from its weights."""
        found = ExponentialMovingAverage(model, self.decay or None)
        known = dict(zip(self._paths, self._averages, strict=True))
        for path, average in zip(found._paths, found._averages, strict=True):
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

    def to_broadcast(self) -> list[tuple[str, torch.Tensor]]:
        """Return the averages as Horovod broadcasts them."""
        return [(f"{PREFIX}.{path}", a) for path, a in zip(self._paths, self._averages, strict=True)]


_Tensors = dict[str, Any]

# Up to this size a buffer is copied at every step: those of batch norm move without a trace that Python sees.
_SMALL_BYTES = 1 << 18


@dataclass(eq=False, slots=True)
class _Place:
    """A tensor that a step may change."""

    holder: _Tensors  # the mapping that has it
    name: str  # its name there
    is_copied: bool  # whether it is copied before it has been seen to change
    always: bool  # whether it is copied at every step, without looking
    tensor: torch.Tensor | None = None  # what was there at the last look
    mark: tuple[int, int] | None = None  # by which a change is seen
    total: complex | None = None  # the sum of its values, if it was taken and the mark is the same since
    copy: torch.Tensor | None = None  # its values before the step; None if it has never been copied

    def look(self, thoroughly: bool) -> bool:
        """Return whether the tensor must be copied, and remember what is there."""
        tensor = self.holder.get(self.name)
        if not isinstance(tensor, torch.Tensor):
            self.tensor = self.mark = self.total = self.copy = None
            return False
        if self.is_copied and tensor.numel() * tensor.element_size() <= _SMALL_BYTES:
            self.always = True
        mark = _mark(tensor)
        is_new, has_moved = self.mark is None, mark != self.mark or tensor is not self.tensor
        before = None if has_moved else self.total
        if thoroughly and not self.always:
            self.total = _total(tensor)
            # an operation on .data changes values and not the mark
            self.always = before is not None and before != self.total
        elif has_moved:
            self.total = None
        self.tensor, self.mark = tensor, mark
        return self.always or (self.is_copied if is_new else has_moved)


class MovingState:
    """The values before a step of everything that the step changes while it may still fail.

    Those are the buffers that a forward pass changes, such as the statistics of batch norm. A task's own step
    also updates parameters before its last reduction; of it, all that the optimizers change is copied.

    Small buffers are copied at every step, large ones, such as masks and tables, when they have changed. A
    frozen parameter, which may be one of billions, is copied when it has been seen to change.

    Args:
        optimizers: those whose updates a step does before its last reduction.
    """

    def __init__(
        self,
        model: nn.Module,
        trainable: Sequence[Entry],
        optimizers: Sequence[torch.optim.Optimizer] = (),
    ) -> None:
        own = {id(entry.tensor) for entry in trainable}
        self._optimizers = list(optimizers)
        self._steps = 0
        self._others: list[tuple[_Tensors, dict[str, Any]]] = []  # what is no tensor, of the optimizers
        self._states: list[tuple[torch.optim.Optimizer, list[tuple[torch.Tensor, _Tensors]]]] = []
        self._slots: dict[tuple[int, str], _Place] = {}
        self._places = []
        for module in model.modules():
            parameters = cast(_Tensors, module._parameters)
            self._places += [_Place(module._buffers, name, True, False) for name in module._buffers]
            for name, parameter in parameters.items():
                if id(parameter) not in own:
                    self._places.append(_Place(parameters, name, False, False))
                elif self._optimizers:
                    self._places.append(_Place(parameters, name, True, True))

    def keep(self) -> None:
        """Copy what may have changed since the last copy. Local: no collective."""
        if not self._places:
            return
        self._steps += 1
        # in steps 1, 2, 4, 8, ...
        thoroughly = self._steps & (self._steps - 1) == 0
        if self._optimizers:
            self._keep_optimizers()
        self._copy([place for place in self._all() if place.look(thoroughly)])

    def restore(self) -> None:
        """Make everything as it was when ``keep`` was called last. Local: no collective."""
        for optimizer, known in self._states:
            optimizer.state.clear()
            optimizer.state.update(known)
        for holder, values in self._others:
            slots = {place.name for place in self._slots.values() if place.holder is holder}
            for key in holder.keys() - values.keys() - slots:
                del holder[key]
            holder.update(values)
        for place in self._all():
            place.holder[place.name] = place.tensor
            if place.tensor is not None and place.copy is not None:
                set_values(place.tensor, place.copy)
                place.mark = _mark(place.tensor)

    def forget(self) -> None:
        """Forget the values of before, as another worker's have come in their place. Local: no collective.

        Horovod writes them without a mark by which a change is seen.
        """
        self._steps = 0
        for place in self._all():
            place.is_copied |= place.copy is not None  # it has been seen to change
            place.mark = place.total = place.copy = None

    def _all(self) -> Iterator[_Place]:
        yield from self._places
        yield from self._slots.values()

    def _keep_optimizers(self) -> None:
        """Note what the optimizers hold in addition to tensors, and where they hold tensors."""
        self._others.clear()
        self._states = [(optimizer, list(optimizer.state.items())) for optimizer in self._optimizers]
        slots: dict[tuple[int, str], _Place] = {}
        for optimizer in self._optimizers:
            for holder in [*optimizer.param_groups, *optimizer.state.values()]:
                others = {}
                for name, value in holder.items():
                    key = id(holder), name
                    if isinstance(value, torch.Tensor):
                        known = self._slots.get(key)
                        is_known = known is not None and known.holder is holder
                        slots[key] = known if known and is_known else _Place(holder, name, True, True)
                    else:
                        others[name] = value
                self._others.append((holder, others))
        self._slots = slots

    @torch.no_grad()
    def _copy(self, places: Sequence[_Place]) -> None:
        """Copy tensors, those of one kind at once."""
        kinds: dict[tuple[torch.dtype, torch.device], tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
        for place in places:
            tensor, copy = place.tensor, place.copy
            assert tensor is not None
            if (
                copy is None
                or copy.shape != tensor.shape
                or copy.dtype != tensor.dtype
                or tensor.layout != torch.strided
            ):
                place.copy = tensor.detach().clone()
                continue
            copies, tensors = kinds.setdefault((tensor.dtype, tensor.device), ([], []))
            copies.append(copy)
            tensors.append(tensor.detach())
        for copies, tensors in kinds.values():
            torch._foreach_copy_(copies, tensors)


def _mark(tensor: torch.Tensor) -> tuple[int, int]:
    """Return what changes if an operation changes a tensor, or it is given other memory."""
    version = -1 if tensor.is_inference() else tensor._version
    return version, tensor.data_ptr() if tensor.layout is torch.strided else 0


def _total(tensor: torch.Tensor) -> complex:
    """Return the sum of a tensor's values; NaN, which is equal to nothing, if there is none."""
    kind = torch.complex128 if tensor.is_complex() else torch.float64
    try:
        return complex(tensor.detach().sum(dtype=kind).item())
    except (RuntimeError, TypeError):  # of a kind that is not added up
        return complex("nan")
