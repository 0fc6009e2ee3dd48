"""Copying tensors of any kind from one worker to all, byte by byte; Horovod itself takes few kinds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import horovod.torch as hvd
import torch

from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.state.tensors import set_values, strided_parts
from hvdtrain.backends.workers import peer_errors
from hvdtrain.errors import ExchangeError, TaskError
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers

# waits for one message and returns what came
Wait = Callable[[], torch.Tensor]

_ALL: Mapping[str, Any] = MappingProxyType({})  # to all workers
_MESSAGE_BYTES = 1 << 30  # MPI counts in 32 bits
_UNDER_WAY_BYTES = 1 << 26  # at once: Horovod may copy a GPU's tensors to the host


def broadcast_model(model: torch.nn.Module, state: ModelState, workers: Workers, root: int) -> None:
    """Collective. Copy the root's parameters, buffers and extra states of modules to every worker.

    Buffers take the root's shapes. A TaskError on every worker says that a worker's model has other tensors.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    parts = [(f"{name}{part}", one) for name, tensor in named for part, one in strided_parts(tensor)]
    own = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in parts]
    problem = _follow(dict(parts), own, workers.broadcast_object(own, root))
    found = next(filter(None, workers.allgather_object(problem)), None)
    if found is not None:
        raise TaskError(found, "torch_model() must make the same model on every worker.", everywhere=True)
    broadcast_tensors([tensor for _, tensor in parts], root, label="model")
    if extra := state.extra_states():
        state.load_extra_states(workers.broadcast_object(extra, root))


def _follow(tensors: Mapping[str, torch.Tensor], own: Sequence[Any], of_root: Sequence[Any]) -> str | None:
    """Give this worker's buffers the root's shapes; return what else differs."""
    if [name for name, *_ in own] != [name for name, *_ in of_root]:
        differing = sorted({name for name, *_ in own} ^ {name for name, *_ in of_root})
        return f"the workers' models have other tensors: {', '.join(differing[:3])}"
    for (name, shape, kind), (_, wanted, its_kind) in zip(own, of_root, strict=True):
        tensor = tensors[name]
        if kind != its_kind or (shape != wanted and isinstance(tensor, torch.nn.Parameter)):
            return f"{name} of the model is {kind} {shape} on one worker and {its_kind} {wanted} on another"
        if shape != wanted:
            set_values(tensor, tensor.new_zeros(wanted))
    return None


def broadcast_tensors(
    tensors: Iterable[torch.Tensor], root: int, group: Mapping[str, Any] = _ALL, label: str = "state"
) -> None:
    """Collective. Copy the root's values of tensors, alike on all workers, to every worker or to some."""
    waits: list[Wait] = []
    copies: list[tuple[torch.Tensor, torch.Tensor]] = []

    def finish() -> None:
        wait_for_all(waits)
        for tensor, memory in copies if hvd.rank() != root else ():
            set_values(tensor, memory.view(tensor.dtype).view(tensor.shape))
        waits.clear()
        copies.clear()

    size = 0
    try:
        for number, tensor in enumerate(tensors):
            memory = _as_bytes(tensor)
            if memory.data_ptr() != tensor.data_ptr():
                copies.append((tensor, memory))
            for place, piece in enumerate(torch.split(memory, _MESSAGE_BYTES) if len(memory) else ()):
                handle = hvd.broadcast_async_(piece, root, f"hvdtrain.{label}.{number}.{place}", **group)
                waits.append(partial(hvd.synchronize, handle))
            size += len(memory)
            if size > _UNDER_WAY_BYTES:
                size = 0
                finish()
    finally:  # Horovod keeps what nobody waited for
        finish()


def wait_for_all(waits: Sequence[Wait]) -> list[torch.Tensor]:
    """Wait for every message, also after one has failed."""
    sums, failure = [], None
    for wait in waits:
        try:
            sums.append(wait())
        except Exception as error:  # Horovod's own, by any name
            failure = failure or error
    if failure is not None:
        raise failure
    return sums


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as bytes, in its own memory if they lie there in the order of its axes."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


# number of the group, of the parameter in it (-1 for the group's options), and the key
_Place = tuple[int, int, str]
_OPTION = -1


def broadcast_optimizer(optimizer: torch.optim.Optimizer, workers: Workers, root: int) -> None:
    """Collective. Copy the root's slots, and options of groups that can travel, to each optimizer."""
    own = _Parts(optimizer)
    layout, values = workers.broadcast_object(own.describe() if workers.rank == root else None, root)
    if workers.rank != root:
        own.follow(layout, values)
    with peer_errors():
        tensors = [own.holders[place[:2]][place[2]] for place, *_ in layout]
        broadcast_tensors(tensors, root, label="slot")


class _Parts:
    """What an optimizer keeps: the options of its groups, and the slots of their parameters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.holders: dict[tuple[int, int], dict[str, Any]] = {}
        self._devices: dict[tuple[int, int], torch.device] = {}
        for number, group in enumerate(optimizer.param_groups):
            self.holders[number, _OPTION] = group
            for place, parameter in enumerate(group["params"]):
                self._devices[number, place] = parameter.device
                if parameter in optimizer.state:
                    self.holders[number, place] = optimizer.state[parameter]
        self._optimizer = optimizer

    def describe(self) -> tuple[list[Any], dict[_Place, Any]]:
        """Return the tensors (place, shape, type, whether on the CPU) and the other values by place."""
        layout, values = [], {}
        for (group, parameter), holder in self.holders.items():
            for key, value in holder.items():
                place = group, parameter, key
                if isinstance(value, torch.Tensor):
                    kind = str(value.dtype).removeprefix("torch.")
                    layout.append((place, tuple(value.shape), kind, value.device.type == "cpu"))
                elif key != "params" and _can_travel(value):
                    values[place] = value
        return layout, values

    def follow(self, layout: list[Any], values: dict[_Place, Any]) -> None:
        """Have the root's values, a tensor wherever the root has one, and no slot that it has not."""
        kept = {place for place, *_ in layout} | values.keys()
        for (group, parameter), holder in self.holders.items():
            for key in [
                key for key in holder if parameter != _OPTION and (group, parameter, key) not in kept
            ]:
                del holder[key]
        for place, value in values.items():
            self._holder(place)[place[2]] = value
        for place, shape, kind, on_cpu in layout:
            holder, dtype = self._holder(place), getattr(torch, kind)
            now = holder.get(place[2])
            if not (isinstance(now, torch.Tensor) and now.shape == shape and now.dtype == dtype):
                device = torch.device("cpu") if on_cpu else self._devices.get(place[:2])
                holder[place[2]] = torch.empty(shape, dtype=dtype, device=device)

    def _holder(self, place: _Place) -> dict[str, Any]:
        group, parameter, _ = place
        if (found := self.holders.get((group, parameter))) is None:
            owner = self._optimizer.param_groups[group]["params"][parameter]
            found = self.holders[group, parameter] = self._optimizer.state[owner]
        return found


def _can_travel(value: Any) -> bool:
    try:
        wire.encode(value)
    except ExchangeError:
        return False
    return True
