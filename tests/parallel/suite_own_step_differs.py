"""Steps of a task's own that differ between two workers. Run in a pool; ``test_own_step.py`` does so."""

import numpy as np
import pytest
from own_step_tasks import Fit
from support.suite import FRAMEWORK, config, on_device, started_backend  # noqa: F401

from hvdtrain import Weighted
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError

SAMPLES = 4  # of a worker


class Differs(Fit):
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

    def torch_step(self, model, batch, optimizers):
        losses = self.torch_loss(model, batch)[0]
        optimizers["main"].minimize(losses)
        return self.result_of(losses)

    def tf_step(self, model, batch, optimizers):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            losses = self.tf_loss(model, batch)[0]
        optimizers["main"].minimize(losses, tape)
        return self.result_of(losses)


class NotEvaluated(Differs):
    """A step beside a loss that training must not call."""

    def torch_loss(self, model, batch):
        if not model.training:
            raise AssertionError("a training step called the loss of evaluations")
        return super().torch_loss(model, batch)


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


@pytest.mark.parametrize("task", [("ab", "b"), ("ba",)])
def test_workers_that_do_alike_train(started, task):
    found = train(started, Differs(*task))
    assert found.mean("b") == pytest.approx(2 * found.mean("a"), rel=1e-6)
    assert found.mean("a") == pytest.approx(found.mean("loss"), rel=1e-6)


def test_a_padded_batch_of_an_own_step_is_not_tried_with_the_loss_of_evaluations(started):
    found = train(started, NotEvaluated("ab"), padding=1)
    assert found.mean("a") == pytest.approx(found.mean("loss"), rel=1e-6)
