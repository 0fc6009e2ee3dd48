"""Copying tensors of any kind from one worker to all, byte by byte; Horovod itself takes few kinds."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.state.tensors import set_values, strided_parts
from hvdtrain.backends.workers import peer_errors
from hvdtrain.errors import ExchangeError
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers, assert_consistent

# waits for one message and returns what came
Wait = Callable[[], torch.Tensor]

_ALL: Mapping[str, Any] = MappingProxyType({})  # to all workers
_MESSAGE_BYTES = 1 << 30  # MPI counts in 32 bits
_UNDER_WAY_BYTES = 1 << 26  # at once: Horovod may copy a GPU's tensors to the host


def broadcast_model(model: nn.Module, state: ModelState, workers: Workers, root: int) -> None:
    """Collective. Copy the root's parameters, buffers with their shapes, and extra states to all."""
    named = [*model.named_parameters(), *model.named_buffers()]
    parts = [(f"{name}{part}", one) for name, tensor in named for part, one in strided_parts(tensor)]
    # with their places: tensors and gradients travel in the model's order
    forms = {
        f"the model's {name}": (place, str(one.dtype), isinstance(one, nn.Parameter) and tuple(one.shape))
        for place, (name, one) in enumerate(parts)
    }
    assert_consistent(workers, forms, "torch_model() must make the same model on every worker.")
    shapes = workers.broadcast_object([tuple(one.shape) for _, one in parts], root)
    for (_, tensor), shape in zip(parts, shapes, strict=True):
        if tensor.shape != shape:
            set_values(tensor, tensor.new_zeros(shape))
    broadcast_tensors([tensor for _, tensor in parts], root, label="model")
    if extra := state.extra_states():
        state.load_extra_states(workers.broadcast_object(extra, root))


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
            memory = bytes_of(tensor)
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


def bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers as bytes, in its own memory if they lie there in the order of its axes."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def broadcast_optimizer(optimizer: torch.optim.Optimizer, workers: Workers, root: int) -> None:
    """Collective. Copy the root's slots, and options of groups that can travel, to each optimizer."""
    groups = optimizer.param_groups
    parameters = [parameter for group in groups for parameter in group["params"]]
    holders = [*groups, *(optimizer.state.get(parameter, {}) for parameter in parameters)]
    sent = list(map(_described, holders)) if workers.rank == root else None
    received = workers.broadcast_object(sent, root)
    if workers.rank != root:
        devices = [*(None for _ in groups), *(parameter.device for parameter in parameters)]
        for holder, values, device in zip(holders, received, devices, strict=True):
            for key in (
                holder.keys() - values.keys() if device is not None else ()
            ):  # slots that the root lacks
                del holder[key]
            for key, (value, form) in values.items():
                holder[key] = value if form is None else _fitting(holder.get(key), form, device)
        own = zip(parameters, holders[len(groups) :], strict=True)
        optimizer.state.update({parameter: slots for parameter, slots in own if slots})
    with peer_errors():
        named = zip(holders, received, strict=True)
        tensors = [h[key] for h, of_one in named for key, (_, form) in of_one.items() if form is not None]
        broadcast_tensors(tensors, root, label="slot")


def _described(holder: Mapping[str, Any]) -> dict[str, tuple[Any, tuple[Any, ...] | None]]:
    """Return what can travel of a group's options, or of a parameter's slots; of tensors their form."""
    found: dict[str, tuple[Any, tuple[Any, ...] | None]] = {}
    for key, value in holder.items():
        if isinstance(value, torch.Tensor):
            kind = str(value.dtype).removeprefix("torch.")
            found[key] = None, (tuple(value.shape), kind, value.device.type == "cpu")
        elif key != "params":
            with suppress(ExchangeError):
                wire.encode(value)
                found[key] = value, None
    return found


def _fitting(value: Any, form: tuple[Any, ...], device: torch.device | None) -> torch.Tensor:
    """Return a tensor of this form: the value if it is one, wherever it is."""
    shape, kind, on_cpu = form
    dtype = getattr(torch, kind)
    if isinstance(value, torch.Tensor) and (tuple(value.shape), value.dtype) == (shape, dtype):
        return value
    return torch.empty(shape, dtype=dtype, device=torch.device("cpu") if on_cpu else device)
