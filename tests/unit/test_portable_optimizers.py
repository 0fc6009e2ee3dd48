"""Optimizers as portable state: a fresh build that takes a state goes on as the one that gave it."""

import numpy as np
import pytest
from support.twins import RANDOM, KerasSide, TorchSide, assert_same, keras, torch

from hvdtrain.errors import TaskError

nn, layers = torch.nn, keras.layers
X = RANDOM.standard_normal((6, 3, 8)).astype(np.float32)


class Net(nn.Module):
    """Modules of every kind of mapping: one to one, one to many, many to one."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.gru = nn.GRU(8, 4, batch_first=True)
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.conv = nn.Conv1d(4, 4, 3, groups=4)
        self.dense = nn.Linear(4, 2)

    def forward(self, x):
        x = self.attention(x, x, x)[0]
        x = self.lstm(self.gru(x)[0])[0]
        return self.dense(self.conv(x.movedim(-1, 1)).movedim(1, -1))


def torch_side(make):
    torch.manual_seed(1)
    module = Net()
    return TorchSide(module, make(module.parameters()))


def train(side, steps=3):
    """Take some steps and give the weights after them."""

    def closure():
        side.optimizer.zero_grad()
        loss = (side.module(torch.from_numpy(X)) ** 2).mean()
        loss.backward()
        return loss

    for _ in range(steps):
        side.optimizer.step(closure)
    return {name: p.detach().numpy().copy() for name, p in side.module.named_parameters()}


class Numbers(torch.optim.Optimizer):
    """An optimizer that keeps Python numbers: a count, a rate and a switch."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        if closure is not None:
            torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update(step=0, rate=1.0, even=True, calls=0, nothing=None)
                assert [type(value) for value in state.values()] == [int, float, bool, int, type(None)]
                p.sub_(p.grad, alpha=group["lr"] * state["rate"] * (2 if state["even"] else 1))
                state["step"] += 1
                state["calls"] += 2
                state["rate"] *= 0.9
                state["even"] = not state["even"]


OWN = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "numbers": Numbers,
}


def test_slots_are_laid_out_as_their_parameters():
    side = torch_side(OWN["adamw"])
    train(side, 1)
    shapes = {name: value.shape for name, value in side.read().items()}
    moments = "optimizer/first_moment/"
    assert shapes[f"{moments}attention/query/kernel"] == shapes["model/attention/query/kernel"] == (8, 2, 4)
    assert shapes[f"{moments}gru/bias"] == (2, 12)
    assert shapes[f"{moments}lstm/bias"] == (16,)
    assert shapes[f"{moments}conv/kernel"] == (3, 4, 1)
    assert shapes["torch/optimizer/first_moment/lstm/bias_hh_l0"] == (16,)
    assert {name for name in shapes if "step" in name} == {"optimizer/step"}


def test_without_private_names_both_biases_of_an_lstm_get_the_slot():
    side, fresh = torch_side(OWN["sgd"]), torch_side(OWN["sgd"])
    train(side)
    state = {name: value for name, value in side.read().items() if not name.startswith("torch/")}
    fresh.write(state)
    for bias in (fresh.module.lstm.bias_ih_l0, fresh.module.lstm.bias_hh_l0):
        found = fresh.optimizer.state[bias]["momentum_buffer"]
        assert found.tolist() == state["optimizer/momentum/lstm/bias"].tolist()


def test_a_refused_state_changes_nothing():
    side, fresh = torch_side(OWN["adamw"]), torch_side(OWN["adamw"])
    side.module.conv.weight.requires_grad_(False)
    empty = side.read()
    train(side)
    state = side.read()
    assert "optimizer/first_moment/conv/kernel" not in state
    del state["optimizer/first_moment/dense/bias"]
    before = fresh.read()
    with pytest.raises(TaskError, match=r"missing: optimizer/first_moment/dense/bias \(2,\)"):
        fresh.write(state)
    assert_same(fresh.read(), before)
    assert all(p.grad is None for p in fresh.module.parameters())
    side.write(empty)
    assert not side.optimizer.state, "as before the first step"


def test_an_optimizer_that_keeps_lists_is_refused_by_name():
    side = torch_side(lambda p: torch.optim.LBFGS(p, max_iter=2))

    train(side, 1)
    with pytest.raises(TaskError, match=r"the state of LBFGS cannot be saved: 'old_dirs' of .* is a list"):
        side.read()
    side = torch_side(OWN["sgd"])
    side.optimizer.state["k"] = {"n": 1}
    with pytest.raises(TaskError, match="cannot be saved: it keeps something for 'k', no parameter"):
        side.read()


def keras_side(make):
    keras.utils.clear_session()
    keras.utils.set_random_seed(1)
    x = keras.Input((3, 8))
    y = layers.Conv1D(4, 3, name="conv")(layers.MultiHeadAttention(2, 4, name="mha")(x, x))
    y = layers.Dense(2, name="dense")(y)
    return KerasSide(keras.Model(x, y), make())


def keras_train(side, steps=2):
    import tensorflow as tf

    variables = side.model.trainable_variables
    for _ in range(steps):
        with tf.GradientTape() as tape:
            loss = keras.ops.mean(side.model(X) ** 2)
        side.optimizer.apply(tape.gradient(loss, [v.value for v in variables]), variables)
    return {v.path: v.numpy() for v in variables}


KERAS = {
    "keras adam": lambda: keras.optimizers.Adam(0.01, amsgrad=True, use_ema=True),
    "keras scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "keras adafactor": lambda: keras.optimizers.Adafactor(0.01),
}


@pytest.mark.parametrize("name", [*OWN, *KERAS])
def test_a_fresh_build_goes_on_bit_by_bit(name):
    make, taken = (torch_side, train) if name in OWN else (keras_side, keras_train)
    side, fresh = (make((OWN | KERAS)[name]) for _ in range(2))
    taken(side)
    state = side.read()
    assert name != "keras adam" or state["optimizer/momentums/mha/query/kernel"].shape == (8, 2, 4)
    fresh.write(state)
    assert_same(fresh.read(), state)
    assert_same(taken(fresh), taken(side))
