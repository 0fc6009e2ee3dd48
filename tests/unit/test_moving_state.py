"""What a step of PyTorch changes is as before if the step fails, however it was changed."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("horovod")

from hvdtrain.backends.torch.state.model_state import Entry  # noqa: E402
from hvdtrain.backends.torch.state.moving_state import MovingState  # noqa: E402


class Model(torch.nn.Module):
    """A layer with statistics, buffers of all kinds, a table that is not saved, and frozen weights."""

    def __init__(self):
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(2)
        self.dense = torch.nn.Linear(2, 1)
        self.target = torch.nn.Linear(2, 1).requires_grad_(False)
        self.register_buffer("table", torch.zeros(3), persistent=False)
        self.register_buffer("late", None)
        self.register_buffer("complex", torch.ones(2, dtype=torch.complex64))
        self.register_buffer("flags", torch.ones(2, dtype=torch.bool))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("sparse", torch.eye(2).to_sparse())
        with torch.inference_mode():
            self.register_buffer("inference", torch.ones(2))

    def trainable(self):
        return [Entry(n, p, True) for n, p in self.named_parameters() if p.requires_grad]


def values(model):
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {name: tensor.detach().to_dense().clone() for name, tensor in tensors}


def assert_same(model, before):
    now = values(model)
    assert now.keys() == before.keys()
    assert [name for name in now if not torch.equal(now[name], before[name])] == []


def in_place(model):
    model.norm(torch.randn(4, 2))
    model.complex.mul_(2)
    model.flags.logical_not_()
    model.sparse.mul_(3)
    with torch.inference_mode():
        model.inference.add_(1)


CHANGES = {
    "replaced": lambda model: setattr(model, "table", model.table + 1),
    "longer": lambda model: setattr(model.table, "data", torch.ones(5)),
    "in place": in_place,
    "made late": lambda model: setattr(model, "late", torch.ones(1)),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_buffer_is_as_before_the_step(change):
    model = Model()
    moving = MovingState(model, model.trainable())
    tensor = model.table
    for _ in range(3):
        moving.keep()
        before = values(model)
        change(model)
        moving.restore()
        assert_same(model, before)
        assert model.table is tensor


@pytest.mark.parametrize("move", ["in place", "by data", "new data"])
def test_frozen_weights_that_training_changes_are_as_before(move):
    def change():
        weight = model.target.weight
        if move == "new data":
            weight.data = weight.data * 0.9
        else:
            (weight if move == "in place" else weight.data).mul_(0.9)

    model = Model()
    found = model.target.weight if move == "by data" else None  # by the dry run
    moving = MovingState(model, model.trainable(), is_changing=lambda one: one is found)
    moving.keep()
    change()
    for _ in range(3):
        moving.keep()
        before = values(model)
        change()
        moving.restore()
        assert_same(model, before)


def test_updates_of_optimizers_are_undone():
    """Fused ones do not count the versions of what they change."""
    model = Model()
    optimizer = torch.optim.AdamW([entry.tensor for entry in model.trainable()], 0.1, fused=True)
    moving = MovingState(model, model.trainable(), [optimizer])

    def update():
        for entry in model.trainable():
            entry.tensor.grad = torch.ones_like(entry.tensor)
        optimizer.step()

    moving.keep()
    update()
    moving.keep()
    before, state = values(model), repr(optimizer.state_dict())
    for _ in range(2):
        update()
        optimizer.param_groups[0] |= {"lr": 7.0, "extra": 1}
        for slots in optimizer.state.values():
            slots["more"] = 1
        moving.restore()
        assert_same(model, before)
        assert repr(optimizer.state_dict()) == state
        moving.keep()
