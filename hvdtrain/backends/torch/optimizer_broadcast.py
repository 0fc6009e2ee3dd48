"""One worker's optimizer to all others. Horovod's function for it is not used: it unpickles what is sent."""

from typing import Any

import torch

from hvdtrain.backends.torch.reduction.broadcast import broadcast_tensors
from hvdtrain.backends.workers import peer_errors
from hvdtrain.errors import ExchangeError
from hvdtrain.workers import wire
from hvdtrain.workers.agreement import Workers

# number of the group, of the parameter in it (-1 for the group's options), and the key
_Place = tuple[int, int, str]
_OPTION = -1


def broadcast_optimizer(optimizer: torch.optim.Optimizer, workers: Workers, root: int) -> None:
    """Collective. Copy the root's slots, and the options of its groups, to every worker's optimizer.

    An option that is no tensor and cannot travel, such as a function, stays each worker's own.

    Args:
        optimizer: the optimizer, with the same groups and parameters on every worker.
        workers: the workers.
        root: the rank whose optimizer is copied.
    """
    own = _Parts(optimizer)
    layout, values = workers.broadcast_object(own.describe() if workers.rank == root else None, root)
    if workers.rank != root:
        own.follow(layout, values)
    with peer_errors():
        named = [(str(n), own.holders[place[:2]][place[2]]) for n, (place, *_) in enumerate(layout)]
        broadcast_tensors(named, root, label="slot")


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
