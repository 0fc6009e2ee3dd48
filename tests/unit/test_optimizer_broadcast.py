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
    hvd = SimpleNamespace(
        broadcast_async_=wire.broadcast_async_, synchronize=lambda handle: handle, rank=lambda: wire.rank
    )
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


def described(optimizer):
    """Give an optimizer's state and options with the types of its values."""
    state = optimizer.state_dict()
    return repr((state["state"], state["param_groups"]))


def sent(wire, root, other):
    for wire.rank, optimizer in ((1, root), (0, other)):
        broadcast_optimizer(optimizer, wire, 1)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (torch.optim.SGD, {"momentum": 0.9}),
        (torch.optim.AdamW, {"betas": (0.8, 0.99), "amsgrad": True}),
        (torch.optim.ASGD, {}),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("steps", [0, 1], ids=["without slots", "with slots"])
def test_everything_is_the_roots(wire, kind, options, steps):
    root, other = stepped(kind, 3, **options), stepped(kind, steps)
    root.param_groups[1]["lr"] = 0.25
    sent(wire, root, other)
    assert described(other) == described(root)


def test_options_that_are_tensors_or_numbers_of_the_optimizer_travel_and_functions_stay(wire):
    root, other = stepped(torch.optim.SGD, 1), stepped(torch.optim.SGD, 1)
    functions = [lambda: 0, lambda: 1]
    root.param_groups[0].update(scale=torch.tensor(2.0), k=7, last=float("nan"), own=functions[0])
    other.param_groups[0].update(scale=torch.tensor(1.0), k=1, last=0.0, own=functions[1])
    sent(wire, root, other)
    group = other.param_groups[0]
    assert (group["scale"].item(), group["k"], group["last"] != group["last"]) == (2.0, 7, True)
    assert group["own"] is functions[1]
