"""PyTorch's sparse gradients, and own steps, in whole steps of two workers, which are threads."""

import pytest
import torch
from support.faked_horovod import FakedHorovod
from support.fakes import one_worker
from support.torch_steps import OUTPUTS, SAMPLES, X, Y, backend_of, parameters, step
from torch import nn

from hvdtrain.backends.torch.steps import custom_step
from hvdtrain.data.order import BatchPlan
from hvdtrain.errors import TaskError


@pytest.fixture
def horovod(monkeypatch):
    return FakedHorovod(monkeypatch)


class Tables:
    """Two sparse embeddings of one size, and a layer; samples choose the table."""

    loss = None

    def __init__(self, choose):
        self.choose = choose

    def torch_model(self):
        model = nn.ModuleDict(
            {name: nn.Embedding(6, OUTPUTS, sparse=True) for name in "ab"}
            | {"c": nn.Linear(OUTPUTS, OUTPUTS)}
        )
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter))
        return model

    def torch_loss(self, model, batch):
        rows = (batch["inputs"][:, 0].abs() * 2).long().clamp(max=5)
        found = model["c"](model[self.choose()](rows))
        return ((found - batch["targets"]) ** 2).mean(1), {}


class PlainTables(Tables):
    """Trained by an optimizer that takes sparse gradients."""

    def torch_optimizer(self, given):
        return torch.optim.SGD(given, 0.01)


@pytest.mark.parametrize("tables", ["ab ab ba", "aa bb ab"])
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_workers_whose_samples_reach_other_embeddings_agree(horovod, tables, compression):
    """In each step, each worker reaches one of them: every table gets the gradient of its samples."""

    def work(workers):
        now = []
        backend = backend_of(workers, PlainTables(lambda: now[-1]), compression=compression)
        for number, of_ranks in enumerate(tables.split()):
            now.append(of_ranks[workers.rank])
            step(backend, number)
        return parameters(backend)

    first, second = horovod.run(work)
    expected = by_hand(tables)
    for a, b, wanted in zip(first, second, expected, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, wanted, rtol=1e-5, atol={"none": 1e-6, "fp16": 1e-4}[compression])


def by_hand(tables):
    model = Tables(None).torch_model()
    optimizer = PlainTables(None).torch_optimizer(model.parameters())
    for of_ranks in tables.split():
        optimizer.zero_grad()
        for rank, name in enumerate(of_ranks):
            places, _ = BatchPlan(SAMPLES, 2, 1).part(rank, SAMPLES)
            batch = {"inputs": torch.from_numpy(X[places[0]]), "targets": torch.from_numpy(Y[places[0]])}
            losses, _ = Tables(lambda name=name: name).torch_loss(model, batch)
            (losses.sum() / SAMPLES).backward()
        optimizer.step()
    return [p.detach() for p in model.parameters()]


def test_an_optimizer_that_may_treat_rows_by_themselves_is_refused():
    class Task(Tables):
        def torch_optimizer(self, given):
            return type("Rows", (torch.optim.SGD,), {})(given, 0.01)

    with pytest.raises(TaskError, match="a gradient is sparse, and Rows of the task may need it so"):
        step(backend_of(one_worker(), Task(lambda: "a")))


class OwnStep(Tables):
    """A step of its own with two optimizers: one trains the embeddings, and the other is called twice."""

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
