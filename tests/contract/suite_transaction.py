"""A step is a transaction: a reduction that fails leaves everything as it was, and workers may then change.

Run inside a job as ``suite_backend.py`` is; ``test_contract.py`` does so with two workers. How a reduction
fails is each framework's own: ``failures_torch.py`` and ``failures_tensorflow.py`` have a class ``Failures``:

    Failures(monkeypatch)         made before a backend is built
    fail(number)                  the reduction with this number, counted from 0 and from now on, fails on all
                                  workers in place of beginning, or of being waited for; None: none fails
    settle(backend)               wait for what the other reductions of a failed step still do
    extra(backend)                what the portable state lacks, by name, such as options of optimizers
    loss_scale(backend)           the numbers of the loss scale, by name; nothing without one
    set_loss_scale(backend, n)    on this worker alone
    resize(backend, size)         as ``workers.restart``: this worker is alone, or one of all
"""

from importlib import import_module
from itertools import count

import numpy as np
import pytest
from conformance.zoo import module
from support import suite
from support.suite import FOLDER, FRAMEWORK, build, on_device, only_torch, started_backend, state_of  # noqa: F401

from hvdtrain.errors import PeerLostError

SAMPLES, INPUTS, OUTPUTS, MICRO = 24, 5, 3, 6
RANDOM = np.random.RandomState(5)
X = RANDOM.randn(SAMPLES, INPUTS).astype(np.float32)
Y = RANDOM.randn(SAMPLES, OUTPUTS).astype(np.float32)
MOST = 4  # workers that the job may have
MAX_PLACES = 200
# the first step makes the optimizer's state; in TensorFlow, a step that fails at every place takes seconds
STEPS = {"torch": 3, "tf": 2}[FRAMEWORK]


@pytest.fixture
def failures(monkeypatch):
    return import_module(f"failures_{FOLDER}").Failures(monkeypatch)


@pytest.fixture
def elastic(started, failures, monkeypatch):
    """The backend of an elastic job, whose workers are as many as were started."""
    workers = started.workers
    monkeypatch.setattr(workers, "is_elastic", True)
    monkeypatch.setattr(workers, "most", MOST)
    place = workers.rank, workers.size
    yield started
    workers.rank, workers.size = place


class Norms:
    """Batch norm, whose moving statistics a forward pass changes, and dropout."""

    loss = "mse"
    dropout = 0.3

    def torch_model(self):
        from torch import nn

        norm = nn.BatchNorm1d(8, momentum=0.1, eps=1e-3)
        middle = norm, nn.Tanh(), nn.Dropout(self.dropout)
        return nn.Sequential(nn.Linear(INPUTS, 8), *middle, nn.Linear(8, OUTPUTS))

    def tf_model(self):
        from keras import Input, Sequential, layers

        norm = layers.BatchNormalization(momentum=0.9, name="1")
        middle = norm, layers.Activation("tanh"), layers.Dropout(self.dropout)
        return Sequential(
            [Input((INPUTS,)), layers.Dense(8, name="0"), *middle, layers.Dense(OUTPUTS, name="4")]
        )


class NoDropout(Norms):
    """Equal for any number of workers."""

    dropout = 0.0


class Sparse:
    """A model of PyTorch with a sparse gradient."""

    loss = "mse"

    def torch_model(self):
        import torch

        def forward(self, x):
            return self.dense(self.table((x[:, 0].abs() * 4).long().clamp(max=8)))

        table = torch.nn.Embedding(9, INPUTS, sparse=True)
        return module(forward, table=table, dense=torch.nn.Linear(INPUTS, OUTPUTS))

    def torch_optimizer(self, parameters):
        import torch

        return torch.optim.SGD(parameters, 0.1)


class Queue:
    """A model of PyTorch with a large buffer and frozen weights, which each step moves."""

    loss = "mse"

    def torch_model(self):
        import torch

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    self.queue += 1
                    self.teacher.weight.lerp_(self.dense.weight, 0.1)
            return self.dense(x)

        dense, teacher = (torch.nn.Linear(INPUTS, OUTPUTS) for _ in range(2))
        return module(forward, dense=dense, teacher=teacher.requires_grad_(False), queue=torch.zeros(100_000))


class Perturbed(Norms):
    """A step of its own with two optimizers, which moves parameters to and fro between its reductions."""

    def torch_optimizers(self, model):
        import torch

        return {
            "first": torch.optim.Adam(model[:2].parameters(), 0.01),
            "last": torch.optim.SGD(model[4].parameters(), 0.02, momentum=0.9),
        }

    def torch_step(self, model, batch, optimizers):
        import torch

        def losses():
            return ((model(batch["inputs"]) - batch["targets"]) ** 2).mean(-1)

        first = optimizers["first"]
        (gradient, *_) = first.gradients(losses())
        with torch.no_grad():
            first.variables[0].add_(gradient, alpha=0.05)
        gradients = first.gradients(losses())
        with torch.no_grad():
            first.variables[0].sub_(gradient, alpha=0.05)
        first.apply(gradients)
        found = losses()
        optimizers["last"].minimize(found)
        return found, {}

    def tf_optimizers(self, model):
        import keras

        return {
            "first": (keras.optimizers.Adam(0.01), model.layers[0].trainable_variables
                      + model.layers[1].trainable_variables),
            "last": (keras.optimizers.SGD(0.02, momentum=0.9), model.layers[4].trainable_variables),
        }  # fmt: skip

    def tf_step(self, model, batch, optimizers):
        import tensorflow as tf

        def losses():
            return tf.reduce_mean((model(batch["inputs"], training=True) - batch["targets"]) ** 2, -1)

        first = optimizers["first"]
        with tf.GradientTape() as tape:
            found = losses()
        gradient = first.gradients(found, tape)[0]
        first.variables[0].assign_add(0.05 * gradient)
        with tf.GradientTape() as tape:
            found = losses()
        gradients = first.gradients(found, tape)
        first.variables[0].assign_sub(0.05 * gradient)
        first.apply(gradients)
        with tf.GradientTape() as tape:
            found = losses()
        optimizers["last"].minimize(found, tape)
        return found, {}


CASES = {
    "momentum": (Norms, {"momentum": 0.9, "clip_norm": 0.5, "ema_decay": 0.9}),
    "adamw, accumulated": (
        Norms,
        {"optimizer": "adamw", "accumulate": 3, "clip_norm": 0.5, "ema_decay": 0.9},
    ),
    "sent as fp16": (Norms, {"compression": "fp16"}),
    "sent during the backward pass": (Norms, {"overlap": "true", "accumulate": 2}),
    "synchronised batch norm": (Norms, {"sync_batch_norm": True}),
    "lars": (Norms, {"optimizer": "lars"}),
    "lamb": (Norms, {"optimizer": "lamb", "clip_norm": 0.5}),
    "loss scale": (NoDropout, {"precision": "fp16"}),
    "own step": (Perturbed, {"ema_decay": 0.9}),
    "sparse": (Sparse, {}),
}

# Keras has no sparse gradients; each case of TensorFlow takes seconds to trace
ONLY_TORCH = {"sparse", "momentum", "lars", "lamb", "sent as fp16", "synchronised batch norm"}


def everything(backend, failures):
    """Give all that training goes on from, on this worker."""
    state = {name: np.array(value) for name, value in state_of(backend).items()}
    others = failures.extra(backend) | failures.loss_scale(backend)
    return state | {name: np.asarray(value) for name, value in others.items()}


def check_same(found, expected, where):
    assert found.keys() == expected.keys(), where
    differ = [name for name, value in found.items() if value.tobytes() != expected[name].tobytes()]
    assert not differ, (where, differ)


def batch(backend, step, accumulate=1):
    """Give this worker's part of a global batch."""
    shuffled = np.random.RandomState(step).permutation(SAMPLES)
    arrays = {"inputs": X[shuffled], "targets": Y[shuffled]}
    return suite.host_batch(backend, arrays, SAMPLES, accumulate=accumulate, step=step)


def train(backend, host, learning_rate=0.1):
    return backend.train_step(on_device(backend, host), learning_rate).read()


def at_each_failure(backend, failures, work):
    """Do some work once for each of its reductions, which fails, and then to its end; return their number."""
    before = everything(backend, failures)
    for number in count():
        assert number < MAX_PLACES
        failures.fail(number)
        try:
            work()
        except PeerLostError:
            failures.fail(None)
            failures.settle(backend)
            check_same(everything(backend, failures), before, f"after a failure of reduction {number}")
            backend.enter_world()
            check_same(everything(backend, failures), before, f"in the world after reduction {number}")
        else:
            break
    failures.fail(None)
    return number


@pytest.mark.parametrize("case", CASES)
def test_a_reduction_that_fails_leaves_a_step_undone(elastic, failures, case, monkeypatch):
    task, fields = CASES[case]
    monkeypatch.setattr("hvdtrain.backends.reduction.shards.LEAST_BYTES", 64)  # several buckets, if any
    if elastic.workers.size == 1 or (case in ONLY_TORCH and FRAMEWORK != "torch"):
        return
    accumulate = fields.get("accumulate", 1)

    def trained(disturbed):
        build(elastic, task(), **fields)
        losses, places = [], 0
        for step in range(STEPS):
            host = batch(elastic, step, accumulate)

            def work(host=host):
                losses.append(train(elastic, host).sums["loss"])

            if disturbed:
                places = at_each_failure(elastic, failures, work)
            else:
                work()
        return losses, everything(elastic, failures), places

    losses, state, _ = trained(disturbed=False)
    found_losses, found, places = trained(disturbed=True)
    assert places >= {"torch": 2, "tf": 1}[FRAMEWORK]  # PyTorch begins a sum, and then waits for it
    assert found_losses == losses
    check_same(found, state, "after steps that failed and were done again")


def test_an_evaluation_that_fails_leaves_the_state_as_it_was(elastic, failures):
    if elastic.workers.size == 1:
        return
    build(elastic, Norms(), ema_decay=0.9)
    train(elastic, batch(elastic, 0))
    host = on_device(elastic, batch(elastic, 1))
    sums = []

    def evaluate():
        with elastic.ema_weights():
            sums.append(elastic.eval_metrics(elastic.eval_step(host)).read().sums["loss"])

    assert at_each_failure(elastic, failures, evaluate) >= 1
    evaluate()
    assert sums[0] == sums[1]


def test_statistics_are_averaged_on_all_workers_or_not_at_all(elastic, failures):
    if elastic.workers.size == 1:
        return
    build(elastic, Norms())
    train(elastic, batch(elastic, 0))
    # mean and variance, in one sum
    assert at_each_failure(elastic, failures, elastic.sync_statistics) >= 1


KEPT, SENT_AS_FP16 = {"momentum": 0.9, "ema_decay": 0.9}, {"compression": "fp16"}
CHANGES = [((2, 1, 2), KEPT), ((1, 2, 1), SENT_AS_FP16), ((1, 2, 1), KEPT), ((2, 1, 2), SENT_AS_FP16)]


@pytest.mark.parametrize(("sizes", "fields"), CHANGES if FRAMEWORK == "torch" else CHANGES[:1])
def test_workers_may_come_and_go(elastic, failures, sizes, fields):
    """Micro-batches keep their shape, their number follows the workers, and so does the curve."""
    everyone, tolerance = elastic.workers.size, 1e-5 if fields.get("compression") is None else 1e-2
    if everyone != 2:
        return

    def trained(sizes, disturbed):
        failures.resize(elastic, sizes[0])
        build(elastic, NoDropout(), **fields)
        losses = []
        for step in range(9):
            size = sizes[step // 3]
            if size != elastic.workers.size:
                if disturbed and elastic.workers.size == everyone:
                    failures.fail({"torch": 1, "tf": 0}[FRAMEWORK])
                    with pytest.raises(PeerLostError):
                        train(elastic, batch(elastic, step, SAMPLES // MICRO // everyone))
                    failures.fail(None)
                    failures.settle(elastic)
                failures.resize(elastic, size)
                elastic.enter_world()
                elastic.broadcast_state(0)
            metrics = train(elastic, batch(elastic, step, SAMPLES // MICRO // size))
            assert len(metrics.busy_seconds) in (0, size)
            losses.append(metrics.sums["loss"])
        return losses, everything(elastic, failures)

    losses, state = trained((1, 1, 1), disturbed=False)
    found_losses, found = trained(sizes, disturbed=True)
    failures.resize(elastic, everyone)
    np.testing.assert_allclose(found_losses, losses, rtol=tolerance)
    for name, value in state.items():
        if not name.startswith("model/1/moving"):  # averages over the worker's own micro-batches
            np.testing.assert_allclose(found[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_new_worker_gets_the_loss_scale(elastic, failures):
    if elastic.workers.size == 1:
        return
    build(elastic, NoDropout(), precision="fp16")
    failures.set_loss_scale(elastic, 512.0 if elastic.workers.rank == 0 else 8.0)
    wanted = elastic.workers.broadcast_object(failures.loss_scale(elastic))
    elastic.broadcast_state(0)
    assert failures.loss_scale(elastic) == wanted
    assert 512.0 in wanted.values()


@only_torch
def test_a_step_after_a_broadcast_is_undone_to_what_was_sent(elastic, failures):
    """Horovod's broadcast leaves no trace in a tensor; what is large is not copied at every step."""
    import torch

    if elastic.workers.size == 1:
        return
    build(elastic, Queue())
    for step in range(2):
        train(elastic, batch(elastic, step))
    failures.fail(0)
    with pytest.raises(PeerLostError):
        train(elastic, batch(elastic, 2))
    failures.fail(None)
    failures.settle(elastic)
    elastic.enter_world()
    if elastic.workers.rank == 0:  # it is a step further
        with torch.no_grad():
            elastic.model.queue += 1
            elastic.model.teacher.weight *= 0.9
    elastic.broadcast_state(0)
    assert float(elastic.model.queue[-1]) == 3
    host = batch(elastic, 3)
    assert at_each_failure(elastic, failures, lambda: train(elastic, host)) >= 1


def random_state():
    """Give what the framework's random numbers follow from."""
    if FRAMEWORK == "torch":
        import torch

        return torch.get_rng_state().numpy().tobytes()
    from keras.src.backend.common import global_state
    from keras.src.random.seed_generator import GLOBAL_SEED_GENERATOR
    from tensorflow.python.eager import context

    generator = global_state.get_global_attribute(GLOBAL_SEED_GENERATOR)
    return None if generator is None else generator.state.numpy().tolist(), context.context()._rng.getstate()


@pytest.mark.parametrize("case", ["adamw", "loss scale", "own step"])
def test_a_warm_up_leaves_everything_as_it_was(elastic, failures, case):
    """A new worker's state may be the one that all others get, and that training goes on from."""
    task, fields = {
        "adamw": (Norms, {"optimizer": "adamw", "weight_decay": 0.1, "ema_decay": 0.9}),
        "loss scale": (NoDropout, {"momentum": 0.9, "precision": "fp16"}),
        "own step": (Perturbed, {"ema_decay": 0.9}),
    }[case]
    everyone = elastic.workers.size
    failures.resize(elastic, 1)
    found = []
    for is_warm in (False, True):
        build(elastic, task(), **fields)
        states = []
        for step in range(3):
            host = batch(elastic, step)
            if is_warm and step < 2:  # a fresh worker, and one that has trained
                before, random = everything(elastic, failures), random_state()
                elastic.warm_up(host, host)
                check_same(everything(elastic, failures), before, "after a warm-up")
                assert random_state() == random
            states.append((train(elastic, host).sums["loss"], everything(elastic, failures)))
        found.append(states)
    failures.resize(elastic, everyone)
    for step, ((loss, expected), (found_loss, state)) in enumerate(zip(*found, strict=True)):
        assert found_loss == loss
        check_same(state, expected, f"step {step} after a warm-up")


@only_torch
def test_a_warm_up_finds_frozen_weights_that_a_step_moves(elastic, failures):
    """So the first step of a new worker can be undone."""
    everyone = elastic.workers.size
    if everyone == 1:
        return
    failures.resize(elastic, 1)
    build(elastic, Queue())
    host = batch(elastic, 0)
    before = everything(elastic, failures)
    elastic.warm_up(host)
    check_same(everything(elastic, failures), before, "after a warm-up")
    failures.resize(elastic, everyone)
    elastic.enter_world()
    elastic.broadcast_state(0)
    host = batch(elastic, 0)
    assert at_each_failure(elastic, failures, lambda: train(elastic, host)) >= 1


@pytest.mark.parametrize("task", [Norms, Perturbed] if FRAMEWORK == "torch" else [Norms])
def test_a_job_whose_workers_stay_copies_nothing(started, monkeypatch, task):
    moving = import_module(f"hvdtrain.backends.{FOLDER}.state.moving_state").MovingState
    monkeypatch.setattr(moving, "keep", lambda self: 1 / 0)
    build(started, task())
    train(started, batch(started, 0))
