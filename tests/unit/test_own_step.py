"""A task's own training step: names and owners of optimizers, their rates, and what is refused."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support.fakes import one_worker
from support.torch_steps import backend_of

from hvdtrain import Weighted
from hvdtrain.backends import custom_step
from hvdtrain.backends import optimizers as named_optimizers
from hvdtrain.backends.portable.names import Renaming
from hvdtrain.backends.records import OwnRates
from hvdtrain.backends.torch.state.model_state import ModelState
from hvdtrain.backends.torch.steps.optimizers import make_optimizers
from hvdtrain.config import Config
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError

BOTH = {"g": ["a", "b"], "d": ["c"]}


CONFIG = Config(task="mine.py:Task", framework="torch", steps=1)


def task(**methods):
    return SimpleNamespace(torch_step=lambda model, batch, optimizers: (batch["x"], {}), **methods)


def test_a_task_without_a_step_has_none_and_one_with_a_step_gets_its_batches_nested():
    assert custom_step.own_step_of(SimpleNamespace(loss="mse"), CONFIG) is None
    own = SimpleNamespace(torch_step=lambda model, batch, optimizers: (batch, {}))
    given, _ = custom_step.own_step_of(own, CONFIG)(None, {"inputs/a": 1, "inputs/b": 2}, None)
    assert given == {"inputs": {"a": 1, "b": 2}}


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        (SimpleNamespace(torch_optimizers=None), r"torch_optimizers\(model\) and no torch_step"),
        (task(torch_optimizers=None, torch_optimizer=None), "both torch_optimizers and torch_optimizer"),
        (task(class_weights=[1, 2]), "class_weights acts on the named loss"),
    ],
)
def test_attributes_that_contradict_one_another_are_refused(given, problem):
    with pytest.raises(TaskError, match=problem):
        custom_step.own_step_of(given, CONFIG)


@pytest.mark.parametrize(
    ("trainable", "owned", "foreign", "problem"),
    [
        ("abce", BOTH, {}, "no optimizer trains e"),
        ("abc", {**BOTH, "d": ["c", "a"]}, {}, "a belong to several optimizers: 'g' and 'd'"),
        ("abc", {**BOTH, "e": []}, {}, "the optimizer 'e' has no trainable parameter"),
        ("abc", BOTH, {"d": 2}, "'d' has 2 parameters that are not the model's"),
    ],
)
def test_other_owners_are_refused(trainable, owned, foreign, problem):
    with pytest.raises(TaskError, match=problem):
        named_optimizers.check_owners("torch_optimizers", [*trainable], owned, foreign)
    for given in (5, {"a/b": "kind"}, {"g": 5}):
        with pytest.raises(TaskError, match="torch_optimizers"):
            named_optimizers.check_named_optimizers(given, str, "torch_optimizers")


def test_the_largest_rate_of_all_is_the_base_and_a_config_replaces_defaults_that_agree():
    rates = {"g": OwnRates("Adam", 0.002, False), "d": OwnRates("SGD", 0.001, False, (1.0, 0.5))}
    combined, relative = named_optimizers.combined_rates(rates)
    assert combined == OwnRates("g: Adam, d: SGD", 0.002, False, (1.0, 0.5, 0.25))
    assert relative == {"g": 1.0, "d": 0.5}
    for other, is_default in ((0.001, True), (0.01, False)):
        rates = {"g": OwnRates("Adam", 0.001, True), "d": OwnRates("SGD", other, True)}
        assert named_optimizers.combined_rates(rates)[0].is_default == is_default


class Side:
    """A model of two networks with an optimizer each, in one worker."""

    def __init__(self, step, **values):
        torch.manual_seed(0)
        task = SimpleNamespace(
            torch_model=lambda: torch.nn.ModuleDict({name: torch.nn.Linear(2, 1) for name in "gd"}),
            torch_optimizers=lambda model: {n: torch.optim.SGD(model[n].parameters(), 0.1) for n in "gd"},
            torch_step=step,
        )
        self.backend = backend_of(one_worker(), task, **values)
        self.model, self.optimizers = self.backend.model, self.backend.parts.optimizers
        arrays = {"x": np.arange(8, dtype=np.float32).reshape(1, 4, 2)}
        self.host_batch = HostBatch(7, arrays, np.ones((1, 4), np.float32), 4.0, np.arange(4)[None])
        (self.batch,) = self.backend.to_device([self.host_batch])

    def run(self):
        return self.backend.train_step(self.batch, 0.5).read()

    def values(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}


def losses_of(model, batch, name):
    return model[name](batch["x"]).squeeze(-1) ** 2


def good(model, batch, optimizers):
    assert optimizers.step == 7
    losses = losses_of(model, batch, "g")
    optimizers["g"].minimize(losses)
    return losses, {}


def test_an_optimizer_moves_its_own_parameters_alone_and_a_dry_run_none():
    rates, kept = [], []

    def step(model, batch, optimizers):
        kept.append(optimizers["g"])
        rates.append(kept[-1].learning_rate)
        return good(model, batch, optimizers)

    side = Side(step)
    before = side.values()
    assert "no step with the optimizer 'd'" in side.backend.dry_run(side.host_batch, training=True).note
    assert all(torch.equal(value, before[name]) for name, value in side.values().items())
    found = side.run()
    after = side.values()
    assert rates == [0.1, 0.5], "a dry run has those as built"
    assert [name for name in before if not torch.equal(before[name], after[name])] == ["g.weight", "g.bias"]
    assert found.unused_names == ()
    assert all(p.grad is None for p in side.model.parameters())
    with pytest.raises(TaskError, match="'g' was used outside of the task's own step"):
        kept[0].minimize(torch.zeros(4))


def test_clipping_leaves_the_gradients_of_the_task_as_they_are():
    found = []

    def step(model, batch, optimizers):
        losses = losses_of(model, batch, "g")
        found.append(optimizers["g"].gradients(losses))
        found.append([g.clone() for g in found[0]])
        optimizers["g"].apply(found[0])
        return losses, {}

    side = Side(step, clip_norm=0.01)
    before = side.values()
    side.run()
    assert all(map(torch.equal, *found))
    moved = torch.cat([(value - before[name]).flatten() for name, value in side.values().items()])
    assert moved.norm() == pytest.approx(0.5 * 0.01, rel=1e-4)


def test_gradients_do_not_share_memory_with_weights_or_with_one_another():
    """The gradient of a sum is the samples' own weights, which the next step uses again."""

    def step(model, batch, optimizers):
        losses = model["g"].weight.squeeze(0).repeat(2) + model["g"].bias
        for gradient in optimizers["g"].gradients(losses):
            gradient.mul_(100)
        return losses, {}

    side = Side(step)
    side.run()
    assert side.batch.gradient_weights[0].tolist() == [0.25] * 4


@pytest.mark.parametrize(
    ("step", "problem"),
    [
        (lambda m, b, o: o["g"].minimize(losses_of(m, b, "g").mean()), "one value per sample"),
        (lambda m, b, o: o["g"].minimize(Weighted(losses_of(m, b, "g"), b["x"])), "found a Weighted"),
        (lambda m, b, o: o["g"].step(), r"step\(\) of the optimizer was called in the task's own step"),
        (lambda m, b, o: o["g"].minimize(losses_of(m, b, "d")), "depend on none of its parameters"),
        (lambda m, b, o: o["g"].apply([torch.zeros(2), torch.zeros(1)]), "of the shapes"),
    ],
)
def test_what_would_train_on_one_worker_alone_is_refused(step, problem):
    side = Side(step)
    before = side.values()
    with pytest.raises(TaskError, match=problem):
        side.run()
    assert all(torch.equal(value, before[name]) for name, value in side.values().items())


def test_parts_of_one_saved_array_belong_to_one_optimizer():
    lstm = torch.nn.LSTM(2, 3)
    owners = {"one": [lstm.bias_ih_l0], "rest": [lstm.weight_ih_l0, lstm.weight_hh_l0, lstm.bias_hh_l0]}
    made = {name: torch.optim.SGD(parameters, 0.1) for name, parameters in owners.items()}
    task = SimpleNamespace(torch_optimizers=lambda model: made)
    with pytest.raises(TaskError, match="parts of model/bias belong to different"):
        make_optimizers(task, lstm, ModelState(lstm, Renaming(SimpleNamespace(), "torch")))
