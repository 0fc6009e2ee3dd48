"""PyTorch's gradients in whole steps of two workers, which are threads: memory, hooks, sparse ones."""

from functools import partial

import pytest
import torch
from support.faked_horovod import FakedHorovod
from support.fakes import one_worker
from support.torch_steps import INPUTS, OUTPUTS, backend_of, parameters, step
from torch import nn

from hvdtrain.backends.torch.reduction.all_reduce import AllReduce
from hvdtrain.backends.torch.steps import custom_step
from hvdtrain.errors import TaskError


class Linear:
    """A layer; a hook may change its gradients."""

    loss = "mse"

    def __init__(self, hook=None):
        self.hook = hook

    def torch_model(self):
        model = nn.Sequential(nn.Linear(INPUTS, 4), nn.Linear(4, OUTPUTS))
        for number, parameter in enumerate(model.parameters()):
            with torch.no_grad():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + number)
            if self.hook is not None:
                parameter.register_post_accumulate_grad_hook(self.hook)
        return model


@pytest.fixture
def horovod(monkeypatch):
    return FakedHorovod(monkeypatch)


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_has_one_reduction(horovod, accumulate):
    def work(workers):
        backend = backend_of(workers, Linear())
        return [step(backend, number, accumulate) for number in range(3)]

    losses = horovod.run(work)
    assert losses[0] == losses[1]
    alone = backend_of(one_worker(), Linear())
    assert losses[0] == pytest.approx([step(alone, number, accumulate) for number in range(3)], rel=1e-6)
    assert horovod.begun[0] == 3 * ["hvdtrain.gradients.0/kernel.0"]


def trained(workers, task, **fields):
    backend = backend_of(workers, task, **fields)
    for number in range(4):
        step(backend, number)
    return parameters(backend)


def in_place(parameter):
    parameter.grad.mul_(0.5)


def some_in_other_memory(parameter):
    if parameter.dim() == 2:
        parameter.grad.data = parameter.grad.data * 0.5


class Moving(Linear):
    """Its optimizer gives gradients other memory: nothing of a step is added to the next one's gradients."""

    class Optimizer(torch.optim.SGD):
        def step(self, closure=None):
            for parameter in self.param_groups[0]["params"]:
                parameter.grad.data = parameter.grad.data.clone()
            return super().step(closure)

    def torch_optimizer(self, given):
        return self.Optimizer(given, 0.01, momentum=0.9)


@pytest.mark.parametrize("make", [partial(Linear, in_place), partial(Linear, some_in_other_memory), Moving])
def test_what_is_made_of_a_gradient_is_summed_and_forgotten(horovod, make):
    """A hook's result is linear, so that the curve is that of one worker."""
    fields = {} if make is Moving else {"momentum": 0.9}
    first, second = horovod.run(lambda workers: trained(workers, make(), **fields))
    for a, b, expected in zip(first, second, trained(one_worker(), make(), **fields), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-6)


class CallsBackward(Linear):
    """In a late micro-batch, its loss calls backward for something else, or makes gradients zero."""

    loss = None

    def __init__(self, clears):
        super().__init__()
        self.calls, self.clears = iter([False, False, False, True]), clears

    def torch_loss(self, model, batch):
        losses = ((model(batch["inputs"]) - batch["targets"]) ** 2).mean(1)
        if next(self.calls, False):
            model.zero_grad() if self.clears else model[1].bias.sum().backward()
        return losses, {}


@pytest.mark.parametrize("clears", [False, True])
def test_a_task_that_changes_gradients_is_refused(horovod, clears):
    def work(workers):
        backend = backend_of(workers, CallsBackward(clears))
        for number in range(2):
            step(backend, number, accumulate=2)

    for run in (horovod.run, lambda work: work(one_worker())):
        with pytest.raises(TaskError, match="was changed outside of the step's own"):
            run(work)


def test_a_backward_pass_between_steps_begins_no_reduction(horovod):
    """A callback of one worker may compute gradients."""

    def work(workers):
        weight = nn.Parameter(torch.ones(2))
        reducer = AllReduce(workers)
        reducer.overlaps = True
        reducer.attach({"weight": weight})
        sums = []
        for number in range(3):
            weight.grad = None
            reducer.follow()
            (number * weight).sum().backward()
            sums.append(reducer.finish([weight.grad])[0][0].tolist())
            if workers.rank == 0:
                weight.sum().backward()
        return sums

    assert horovod.run(work) == 2 * [[[0, 0], [2, 2], [4, 4]]]


class Uneven:
    """A shared layer, and one that a worker reaches with positive sums of its inputs alone."""

    loss = "mse"

    def torch_model(self):
        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.shared = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, INPUTS)
                self.rare, self.last = nn.Linear(INPUTS, INPUTS), nn.Linear(INPUTS, OUTPUTS)
                for parameter in self.parameters():
                    nn.init.constant_(parameter, 0.1)

            def forward(self, x):
                shared = self.shared(self.shared(self.first(x)))
                return self.last(self.rare(shared) if x.sum() > 0 else shared)

        return Model()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_early_sums_are_those_of_late_ones_whatever_a_worker_reaches(horovod, monkeypatch, accumulate):
    monkeypatch.setattr("hvdtrain.backends.reduction.shards.LEAST_BYTES", 16)

    def trained(overlap):
        def work(workers):
            backend = backend_of(workers, Uneven(), momentum=0.9, overlap=overlap)
            for number in range(4):
                # the workers reach the layer in different steps
                step(backend, number, accumulate, times=(-1) ** (number // (workers.rank + 1)))
            return parameters(backend)

        return horovod.run(work)

    early, late = trained("true"), trained("false")
    for found, expected in zip([*early[0], *early[1]], [*late[0], *late[0]], strict=True):
        assert torch.equal(found, expected)


class Tables:
    """Two sparse embeddings of one size, and a layer; each part of the samples has a table."""

    loss = None

    def __init__(self, choose):
        self.choose = choose

    def torch_model(self):
        tables = {name: nn.Embedding(6, OUTPUTS, sparse=True) for name in "ab"}
        model = nn.ModuleDict({**tables, "c": nn.Linear(OUTPUTS, OUTPUTS)})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        return model

    def torch_optimizer(self, given):
        return torch.optim.SGD(given, 0.01)

    def torch_loss(self, model, batch):
        names, rows = self.choose(), (batch["inputs"][:, 0].abs() * 2).long().clamp(max=5)
        parts = zip(names, rows.chunk(len(names)), strict=True)
        found = model["c"](torch.cat([model[name](part) for name, part in parts]))
        return ((found - batch["targets"]) ** 2).mean(1), {}


@pytest.mark.parametrize(("tables", "compression"), [("ab ab ba", "none"), ("aa bb ab", "fp16")])
def test_workers_whose_samples_reach_other_embeddings_agree(horovod, tables, compression):
    """In each step, each worker reaches one of them: every table gets the gradient of its samples."""

    def work(workers):
        now = []
        backend = backend_of(workers, Tables(lambda: now[-1]), compression=compression)
        for number, names in enumerate(tables.split()):
            now.append(names[workers.rank] if workers.size > 1 else names)
            step(backend, number)
        return parameters(backend)

    first, second = horovod.run(work)
    for a, b, wanted in zip(first, second, work(one_worker()), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, wanted, rtol=1e-5, atol={"none": 1e-6, "fp16": 1e-4}[compression])


def test_an_optimizer_that_may_treat_rows_by_themselves_is_refused():
    task = Tables(lambda: "a")
    task.torch_optimizer = lambda given: type("Rows", (torch.optim.SGD,), {})(given, 0.01)
    with pytest.raises(TaskError, match="a gradient is sparse, and Rows of the task may need it so"):
        step(backend_of(one_worker(), task))


class OwnStep(Tables):
    """A step of its own with two optimizers: one trains the embeddings, and the other is called twice."""

    torch_optimizer = property()  # it has none

    def torch_optimizers(self, model):
        tables = [*model["a"].parameters(), *model["b"].parameters()]
        return {"tables": torch.optim.SparseAdam(tables), "c": torch.optim.SGD(model["c"].parameters(), 0.1)}

    def torch_step(self, model, batch, optimizers):
        for name in ("tables", "c", "c"):
            losses, _ = self.torch_loss(model, batch)
            optimizers[name].minimize(losses)
        return losses, {}


def test_gradients_of_an_own_step_are_copied_once(horovod, monkeypatch):
    """On each worker, the samples reach one of two embeddings; the optimizer takes sparse gradients alone."""
    monkeypatch.setattr(custom_step.StepOptimizer, "_owned", lambda *_: 1 / 0)

    def work(workers):
        backend = backend_of(workers, OwnStep(lambda: "ab"[workers.rank]))
        losses = [step(backend, number) for number in range(3)]
        return losses, parameters(backend)

    (losses, first), (other_losses, second) = horovod.run(work)
    assert losses == other_losses
    assert losses[-1] < losses[0]
    assert all(map(torch.equal, first, second))
