"""PyTorch's gradients in whole steps of two workers, which are threads: memory, hooks, backward()."""

import pytest
import torch
from support.faked_horovod import FakedHorovod
from support.fakes import one_worker
from support.torch_steps import INPUTS, OUTPUTS, backend_of, parameters, step
from torch import nn

from hvdtrain.backends.torch.reduction.all_reduce import AllReduce
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


def halved_in_place(parameter):
    parameter.grad.mul_(0.5)


def halved_elsewhere(parameter):
    parameter.grad = parameter.grad * 0.5


def halved_in_other_memory(parameter):
    parameter.grad.data = parameter.grad.data * 0.5


def some_in_other_memory(parameter):
    if parameter.dim() == 2:
        halved_in_other_memory(parameter)


@pytest.mark.parametrize("hook", [halved_in_place, halved_elsewhere, some_in_other_memory])
def test_what_a_hook_makes_of_a_gradient_is_summed(horovod, hook):
    """The hook's result is linear, so that the curve is that of one worker."""

    def trained(workers):
        backend = backend_of(workers, Linear(hook), momentum=0.9)
        for number in range(4):
            step(backend, number)
        return parameters(backend)

    first, second = horovod.run(trained)
    for a, b, expected in zip(first, second, trained(one_worker()), strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-6)


def test_an_optimizer_may_give_gradients_other_memory(horovod):
    """Nothing of an earlier step is added to the next one's gradients."""

    class Moving(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.data = parameter.grad.data.clone()
            return super().step(closure)

    class Task(Linear):
        def torch_optimizer(self, given):
            return Moving(given, 0.01)

    def trained(workers):
        backend = backend_of(workers, Task())
        for number in range(4):
            step(backend, number)
        return parameters(backend)

    first, _ = horovod.run(trained)
    for a, expected in zip(first, trained(one_worker()), strict=True):
        torch.testing.assert_close(a, expected, rtol=1e-5, atol=1e-6)


class CallsBackward(Linear):
    """Its loss calls backward for something else than the losses, in some steps."""

    loss = None

    def __init__(self, calls):
        super().__init__()
        self.calls = iter(calls)

    def torch_loss(self, model, batch):
        losses = ((model(batch["inputs"]) - batch["targets"]) ** 2).mean(1)
        if next(self.calls, False):
            model[1].bias.sum().backward()
        return losses, {}


@pytest.mark.parametrize("calls", [[True], [False, False, False, True]])
@pytest.mark.parametrize(("accumulate", "workers"), [(1, 1), (2, 2)])
def test_a_task_that_calls_backward_is_refused(horovod, calls, accumulate, workers):
    def work(workers):
        backend = backend_of(workers, CallsBackward(calls))
        for number in range(4):
            step(backend, number, accumulate)

    with pytest.raises(TaskError, match=r"the gradient of 1/bias was changed outside of the step's own"):
        work(one_worker()) if workers == 1 else horovod.run(work)


class ClearsGradients(CallsBackward):
    """Its loss makes gradients zero, as loops do that were written by hand."""

    def torch_loss(self, model, batch):
        model.zero_grad(set_to_none=next(self.calls))
        return ((model(batch["inputs"]) - batch["targets"]) ** 2).mean(1), {}


@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_are_lost_between_micro_batches_are_refused(to_none):
    backend = backend_of(one_worker(), ClearsGradients([to_none] * 2))
    with pytest.raises(TaskError, match="was changed outside"):
        step(backend, accumulate=2)


def test_a_backward_pass_between_steps_begins_no_reduction(horovod):
    """A callback of one worker may compute gradients."""

    def work(workers):
        weight = nn.Parameter(torch.ones(2))
        reducer = AllReduce(workers, overlaps=True)
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
