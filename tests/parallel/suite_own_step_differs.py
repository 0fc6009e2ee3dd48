"""Steps of a task's own that differ between two workers. Run in a pool; ``test_own_step.py`` does so."""

import numpy as np
import pytest
from own_step_tasks import Plain
from support.suite import FRAMEWORK, config, on_device, started_backend  # noqa: F401

from hvdtrain import Weighted
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError

SAMPLES = 4  # of a worker


class Differs(Plain):
    """A step in which one worker decides for itself which metrics to return."""

    def __init__(self, metrics, weighted=()):
        super().__init__()
        self.names, self.weighted = metrics, weighted

    def result_of(self, losses):
        """Return what the step returns."""
        ones = losses.detach() * 0 + 1 if FRAMEWORK == "torch" else losses * 0 + 1
        values = {name: losses * place for place, name in enumerate("ab", 1)}
        values |= {name: Weighted(values[name], ones) for name in self.weighted}
        return losses, {name: values[name] for name in self.names}

    def torch_loss(self, model, batch):
        assert model.training, "a training step called the loss of evaluations"
        return super().torch_loss(model, batch)

    def torch_step(self, model, batch, optimizers):
        return self.result_of(super().torch_step(model, batch, optimizers)[0])

    def tf_step(self, model, batch, optimizers):
        return self.result_of(super().tf_step(model, batch, optimizers)[0])


def train(backend, task, padding=0):
    backend.build(task, config(learning_rate=0.01))
    arrays = {
        name: a[None, :SAMPLES] for name, a in zip(("inputs", "targets"), task.train_data(), strict=True)
    }
    weights = np.ones((1, SAMPLES), np.float32)
    weights[0, SAMPLES - padding :] = 0
    batch = HostBatch(0, arrays, weights, 2.0 * (SAMPLES - padding), np.arange(SAMPLES))
    return backend.train_step(on_device(backend, batch), 0.01).read()


@pytest.mark.parametrize(
    ("tasks", "problem"),
    [
        ([("ab",), ("ba",)], "call 2 of a step is the end, with the values 'loss', "),
        ([("ab",), ("a",)], "call 2 of a step is the end, with the values 'loss', 'a'"),
        ([("ab",), ("ab", "a")], "call 2 of a step is the end, with the values 'loss', 'a'"),
    ],
    ids=["order", "number", "weighted"],
)
def test_workers_that_differ_are_told_so(started, tasks, problem):
    with pytest.raises(TaskError) as raised:
        train(started, Differs(*tasks[started.workers.rank]))
    for _ in range(2):  # what the step began to reduce has ended then, and the next case may use its names
        started.workers.allgather_object(None)
    assert problem in str(raised.value)
    assert raised.value.everywhere


@pytest.mark.parametrize("padding", [0, 1])
def test_workers_that_do_alike_train(started, padding):
    found = train(started, Differs("ab", "b"), padding)
    assert found.mean("b") == pytest.approx(2 * found.mean("a"), rel=1e-6)
    assert found.mean("a") == pytest.approx(found.mean("loss"), rel=1e-6)
