"""One worker's PyTorch optimizer to the others: its slots and options, and none that it lacks."""

from types import SimpleNamespace

import pytest
import torch

from hvdtrain.backends.torch.reduction import broadcast as state_broadcast
from hvdtrain.backends.torch.reduction.broadcast import broadcast_optimizer
from hvdtrain.workers.wire import decode, encode


class Wire:
    """Two workers, one after the other: what the root sends is kept for the other."""

    def __init__(self) -> None:
        self.rank, self.kept, self.tensors = 1, b"", {}

    def broadcast_object(self, value, root=0):
        if self.rank == root:
            self.kept = encode(value)
            return value
        return decode(self.kept)

    def broadcast_async_(self, tensor, root, name):
        if self.rank == root:
            self.tensors[name] = tensor.clone()
        else:
            assert tensor.dtype == self.tensors[name].dtype
            tensor.copy_(self.tensors[name])
        return name


@pytest.fixture
def wire(monkeypatch):
    wire = Wire()
    functions = {"synchronize": lambda handle: handle, "rank": lambda: wire.rank}
    hvd = SimpleNamespace(broadcast_async_=wire.broadcast_async_, **functions)
    monkeypatch.setattr(state_broadcast, "hvd", hvd)
    return wire


def stepped(kind, steps, **options):
    """Give an optimizer of two parameters after some steps, of which the second is not trained by all."""
    torch.manual_seed(steps)
    parameters = [torch.nn.Parameter(torch.randn(3, 2)), torch.nn.Parameter(torch.randn(4))]
    optimizer = kind([{"params": parameters[:1]}, {"params": parameters[1:], "lr": 0.5}], lr=0.1, **options)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.ASGD])
@pytest.mark.parametrize("steps", [0, 1], ids=["without slots", "with slots"])
def test_everything_is_the_roots_but_functions_stay(wire, kind, steps):
    root, other = stepped(kind, 3, weight_decay=0.25), stepped(kind, steps)
    functions = [lambda: 0, lambda: 1]
    root.param_groups[0].update(scale=torch.tensor(2.0), k=7, own=functions[0])
    other.param_groups[0].update(scale=torch.tensor(1.0), k=1, own=functions[1])
    for wire.rank, optimizer in ((1, root), (0, other)):
        broadcast_optimizer(optimizer, wire, 1)
    assert other.param_groups[0].pop("own") is functions[1]
    del root.param_groups[0]["own"]
    assert repr(other.state_dict()) == repr(root.state_dict()), "values and their types"
