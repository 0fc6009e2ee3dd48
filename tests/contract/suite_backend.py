"""What every backend must do, at any number of workers. Run inside a job, one process a worker:

    horovodrun -np 2 python -m pytest -p no:cacheprovider tests/contract/suite_backend.py

with HVDTRAIN_TEST_FRAMEWORK set; ``test_contract.py`` does so for every framework, controller and
worker count. Every worker runs the same tests in the same order.
"""

import time
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from conformance.zoo import module
from support import suite
from support.suite import FRAMEWORK, assert_equal, load, on_device, started_backend, state_of  # noqa: F401

from hvdtrain.backends.base import check_replicas
from hvdtrain.backends.records import StatePart
from hvdtrain.backends.step_metrics import ControlFlags, StepStatistics, encode_signals
from hvdtrain.data.feed import HostBatch
from hvdtrain.errors import TaskError
from hvdtrain.workers.seeding import random_state_kept

SAMPLES, INPUTS, OUTPUTS = 24, 5, 3
RANDOM = np.random.RandomState(7)
X = RANDOM.randn(SAMPLES, INPUTS).astype(np.float32)
Y = RANDOM.randn(SAMPLES, OUTPUTS).astype(np.float32)
config = partial(suite.config, momentum=0.0)


class Linear:
    """outputs = inputs @ kernel + bias, with mean squared error: its gradient is known in closed form."""

    loss = "mse"
    metrics = {"mae": "mae"}  # noqa: RUF012

    def torch_model(self):
        from torch import nn

        return nn.Sequential(OrderedDict(dense=nn.Linear(INPUTS, OUTPUTS)))

    def tf_model(self):
        import keras

        x = keras.Input((INPUTS,))
        return keras.Model(x, keras.layers.Dense(OUTPUTS, name="dense")(x))


class Mixed(Linear):
    """Layers with state: convolution, batch norm, layer norm, embedding-free dropout."""

    metrics = {}  # noqa: RUF012
    dropout = 0.5

    def torch_model(self):
        from torch import nn
        from torch.nn import functional as F

        def forward(self, x):
            x = F.silu(self.norm(self.conv(x[:, None, :])))
            x = self.layer_norm(x.permute(0, 2, 1))
            return self.dense(self.drop(x.flatten(1)))

        norms = {"norm": nn.BatchNorm1d(4, momentum=0.01, eps=1e-3), "layer_norm": nn.LayerNorm(4, eps=1e-3)}
        conv, drop = nn.Conv1d(1, 4, 3, padding=1), nn.Dropout(self.dropout)
        return module(forward, conv=conv, **norms, drop=drop, dense=nn.Linear(INPUTS * 4, OUTPUTS))

    def tf_model(self):
        import keras
        from keras import layers

        inputs = keras.Input((INPUTS,))
        x = layers.Reshape((INPUTS, 1))(inputs)
        x = layers.Conv1D(4, 3, padding="same", name="conv")(x)
        x = layers.Activation("silu")(layers.BatchNormalization(momentum=0.99, name="norm")(x))
        x = layers.LayerNormalization(epsilon=1e-3, name="layer_norm")(x)
        x = layers.Dropout(self.dropout)(layers.Flatten()(x))
        return keras.Model(inputs, layers.Dense(OUTPUTS, name="dense")(x))


class Dropping(Linear):
    """Dropout before the layer."""

    metrics = {}  # noqa: RUF012

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Dropout(0.5), nn.Linear(INPUTS, OUTPUTS))

    def tf_model(self):
        from keras import Input, Sequential, layers

        return Sequential([Input((INPUTS,)), layers.Dropout(0.5), layers.Dense(OUTPUTS)])


class Branches(Linear):
    """A second branch that only rank 0 takes."""

    metrics = {}  # noqa: RUF012

    def __init__(self, taken):
        self.taken = taken

    def torch_model(self):
        from torch import nn

        taken = self.taken

        def forward(self, x):
            return self.dense(x) + self.branch(x) if taken else self.dense(x)

        return module(forward, dense=nn.Linear(INPUTS, OUTPUTS), branch=nn.Linear(INPUTS, OUTPUTS))

    def tf_model(self):
        import keras

        taken = self.taken

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(OUTPUTS)
                self.branch = keras.layers.Dense(OUTPUTS)

            def call(self, x):
                return self.dense(x) + self.branch(x) if taken else self.dense(x)

            def build(self, shape):
                self.dense.build(shape)
                self.branch.build(shape)
                super().build(shape)

        model = Model()
        model.build((None, INPUTS))
        return model


def build(backend, task, **fields):
    """Build a task's model with initial values that are equal on all workers."""
    suite.build(backend, task, **{"momentum": 0.0, **fields})
    return backend


def host_batch(backend, count=SAMPLES, **fields):
    """Give this worker's part of a batch of some samples."""
    return suite.host_batch(backend, {"inputs": X, "targets": Y}, count, **fields)


def global_batch(backend, count=SAMPLES, **fields):
    return on_device(backend, host_batch(backend, count, **fields))


def step(backend, batch, learning_rate=0.1):
    return backend.train_step(batch, learning_rate).read()


def gradient(kernel, bias, x, y):
    """Give the mean gradient over samples of the per-sample mean squared error, and the mean loss."""
    error = x @ kernel + bias - y
    return 2 / error.size * x.T @ error, 2 / error.size * error.sum(0), float((error**2).mean())


def linear(state):
    return state["model/dense/kernel"].astype(np.float64), state["model/dense/bias"].astype(np.float64)


# of a smaller last batch, some workers may have no sample
@pytest.mark.parametrize(("count", "accumulate", "size"), [(24, 2, 24), (23, 1, 23), (7, 2, 7), (1, 1, 8)])
def test_step_applies_the_mean_gradient_of_the_global_batch(started, count, accumulate, size):
    backend = build(started, Linear(), accumulate=accumulate)
    kernel, bias = linear(state_of(backend))
    totals = step(backend, global_batch(backend, count, accumulate=accumulate, size=size))
    d_kernel, d_bias, loss = gradient(kernel, bias, X[:count], Y[:count])
    new_kernel, new_bias = linear(state_of(backend))
    np.testing.assert_allclose(new_kernel, kernel - 0.1 * d_kernel, atol=2e-7)
    np.testing.assert_allclose(new_bias, bias - 0.1 * d_bias, atol=2e-7)
    assert totals.weight == count
    assert totals.sums["loss"] / totals.weight == pytest.approx(loss, rel=1e-5)
    assert totals.sums["mae"] / totals.weight == pytest.approx(
        np.abs(X[:count] @ kernel + bias - Y[:count]).mean(), rel=1e-5
    )


def test_metrics_of_a_step_are_its_own_whenever_they_are_read(started):
    backend = build(started, Linear())
    pending = [backend.train_step(global_batch(backend, 12), 0.0) for _ in range(3)]
    found = [metrics.read() for metrics in pending]
    assert [metrics.weight for metrics in found] == [12, 12, 12]
    last = step(backend, global_batch(backend, 12), 0.0)
    for metrics in found:
        assert metrics.sums["loss"] == pytest.approx(last.sums["loss"], rel=1e-6)


def dry_run(backend, training=True, accumulate=1):
    """Dry-run this worker's part of all samples."""
    return backend.dry_run(host_batch(backend, accumulate=accumulate), training)


def drawn():
    """Draw from the generators that a task's own code may use."""
    if FRAMEWORK == "torch":
        import torch

        return torch.rand(3).tolist()
    import keras
    import tensorflow as tf

    return [*tf.random.uniform([3]).numpy().tolist(), *keras.random.uniform([3]).numpy().tolist()]


class Drawing(Mixed):
    """Draws from the global generators, too; batch norm is to be synchronised."""

    def loss(self, outputs, batch):
        if FRAMEWORK == "torch":
            import torch

            return ((outputs + torch.rand(1) - batch["targets"]) ** 2).mean(1)
        import keras
        import tensorflow as tf

        shift = tf.random.uniform([1]) + keras.random.uniform([1])
        return tf.reduce_mean((outputs + shift - batch["targets"]) ** 2, 1)


@pytest.mark.local
@pytest.mark.parametrize(
    ("task", "fields"),
    [
        (Mixed, {"accumulate": 2, "sync_batch_norm": True, "ema_decay": 0.9, "optimizer": "adamw"}),
        (Drawing, {"clip_norm": 0.1}),
    ],
    ids=["all", "drawing"],
)
def test_a_dry_run_changes_nothing(started, task, fields):
    """Two steps and an evaluation after it are bit-identical to those without one, as are random numbers."""
    results = []
    for has_dry_run in (False, True):
        backend = build(started, task(), **fields)
        before = state_of(backend)
        if has_dry_run:
            with random_state_kept():  # Keras seeds its global generator by Python's
                found = [dry_run(backend, t, fields.get("accumulate", 1)) for t in (True, False, True)]
            assert [one.error for one in found] == [None, None, None]
            after = state_of(backend)
            assert all(after[name].tobytes() == value.tobytes() for name, value in before.items())
        numbers = drawn()
        accumulate = fields.get("accumulate", 1)
        batches = [global_batch(backend, accumulate=accumulate, step=i) for i in range(2)]
        sums = [step(backend, batch).sums for batch in batches]
        evaluation = evaluated(backend, [global_batch(backend)]).sums if task is Mixed else None
        state = {name: value.tobytes() for name, value in state_of(backend).items()}
        results.append((numbers, sums, evaluation, state, drawn()))
    assert results[0] == results[1]


@pytest.mark.local
def test_a_dry_run_gives_outputs_and_the_values_of_samples(started):
    backend = build(started, Linear())
    kernel, bias = linear(state_of(backend))
    own = host_batch(backend).arrays
    for training in (True, False):
        found = dry_run(backend, training)
        error = own["inputs"][0] @ kernel + bias - own["targets"][0]
        np.testing.assert_allclose(found.outputs, error + own["targets"][0], atol=1e-5)
        np.testing.assert_allclose(found.values["loss"], (error**2).mean(1), rtol=1e-4)
        np.testing.assert_allclose(found.values["mae"], np.abs(error).mean(1), rtol=1e-4)
        assert (found.error, found.last_activation) == (None, "")


@pytest.mark.local
def test_one_worker_may_do_a_dry_run_alone(started):
    """It begins no reduction, and steps after it are those of all workers."""
    backend = build(started, Linear())
    kernel, bias = linear(state_of(backend))
    if started.workers.rank == 0:
        assert dry_run(backend).error is None
    step(backend, global_batch(backend))
    d_kernel, _, _ = gradient(kernel, bias, X, Y)
    np.testing.assert_allclose(linear(state_of(backend))[0], kernel - 0.1 * d_kernel, atol=2e-7)


class Wrong(Linear):
    """Its loss or a metric is wrong in a way that its text names."""

    def __init__(self, **changes):
        self.metrics = {}
        vars(self).update(changes)


def raises(outputs, batch):
    raise ValueError("no such loss")


def in_graphs_alone(outputs, batch):
    """Works while a step is traced, as TensorFlow's tf.gradients does."""
    if FRAMEWORK == "tf":
        import tensorflow as tf

        tf.gradients(outputs, outputs)
    return ((outputs - batch["targets"]) ** 2)[:, 0]


@pytest.mark.local
def test_a_dry_run_takes_what_works_in_a_step(started):
    backend = build(started, Wrong(loss=in_graphs_alone))
    found = dry_run(backend)
    assert found.error is None
    total = step(backend, global_batch(backend), 0.0).sums["loss"]
    if started.workers.size == 1:
        assert found.values["loss"].sum() == pytest.approx(total, rel=1e-5)


@pytest.mark.local
@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"loss": raises}, "no such loss"),
        (
            {"metrics": {"f1": lambda o, b: 0.5}},
            "f1 must give one value per sample, shape (24,); found a",
        ),
        (
            {"metrics": {"a": lambda o, b: (o - b["targets"])[0, 0]}},
            "a must give one value per sample, shape (24,); found shape ()",
        ),
        (
            {f"{FRAMEWORK}_loss": lambda model, batch: model(batch["inputs"])[:, 0]},
            f"{FRAMEWORK}_loss must return (loss per sample, {{metric: value per sample}}); found a",
        ),
    ],
    ids=["raises", "float", "scalar", "no pair"],
)
def test_a_dry_run_gives_what_was_raised_and_the_outputs_before_it(started, changes, problem):
    if started.workers.size > 1:
        pytest.skip("of one worker")
    backend = build(started, Wrong(**changes))
    found = dry_run(backend)
    assert problem in str(found.error)
    assert found.outputs.shape == (SAMPLES, OUTPUTS)
    assert found.values == {}
    assert dry_run(build(started, Linear())).error is None


def evaluated(backend, batches, *signals):
    """Evaluate batches; give their sums over all workers."""
    partial = None
    for batch in batches:
        partial = backend.eval_step(batch, partial)
    return backend.eval_metrics(partial, *signals).read()


@pytest.mark.parametrize("phase", ["train", "eval"])
def test_signals_add_up_over_workers_and_a_flag_of_one_reaches_all(started, phase):
    backend, rank, size = build(started, Linear()), started.workers.rank, started.workers.size
    own = ControlFlags(stop=rank == size - 1, save=rank == 0)
    signals = encode_signals(own, StepStatistics(1 + rank, 0.25))
    if phase == "train":
        metrics = backend.train_step(global_batch(backend, 12), 0.0, signals).read()
    else:
        metrics = evaluated(backend, [global_batch(backend, 12)], signals)
    assert metrics.flags == ControlFlags(stop=True, save=True)
    assert metrics.statistics == StepStatistics(size * (size + 1) / 2, 0.25 * size)
    assert (metrics.weight, metrics.unused_parameters, metrics.overflow_exhausted) == (12, 0, False)


_PAUSE_SECONDS = 2.5  # some hundred times a step of an idle machine


def test_each_worker_says_how_long_it_was_busy_in_the_step_before(started):
    backend, workers = build(started, Linear()), started.workers
    step(backend, global_batch(backend, 12))  # which TensorFlow compiles
    time.sleep(_PAUSE_SECONDS)
    backend.restart_clock()  # a pause does not count
    time.sleep(0.05 * workers.rank)
    step(backend, global_batch(backend, 12))
    busy = backend.train_step(global_batch(backend, 12), 0.0).read().busy_seconds
    assert len(busy) == (workers.size if workers.size > 1 else 0)
    for rank, seconds in enumerate(busy):
        assert 0.05 * rank < seconds < 0.05 * rank + 0.9 * _PAUSE_SECONDS


def test_clipping_acts_on_the_averaged_gradient(started):
    backend = build(started, Linear(), clip_norm=0.01)
    kernel, bias = linear(state_of(backend))
    metrics = step(backend, global_batch(backend), 1.0)
    d_kernel, d_bias, _ = gradient(kernel, bias, X, Y)
    norm = np.sqrt((d_kernel**2).sum() + (d_bias**2).sum())
    assert norm > 0.01
    assert metrics.mean("gradient_norm") == pytest.approx(norm, rel=1e-4)
    change = kernel - linear(state_of(backend))[0]
    np.testing.assert_allclose(change, d_kernel * 0.01 / norm, rtol=1e-3, atol=1e-7)


def test_parameters_without_gradient_count_as_zeros_and_hang_nobody(started):
    rank, size = started.workers.rank, started.workers.size
    backend = build(started, Branches(taken=rank == 0), weight_decay=0.1)
    before = state_of(backend)
    totals = step(backend, global_batch(backend))
    after = state_of(backend)
    assert totals.unused_parameters == 2 * (size - 1)
    assert totals.unused_names == (() if rank == 0 else ("model/branch/kernel", "model/branch/bias"))
    check_replicas(backend)
    assert (after["model/branch/kernel"] != before["model/branch/kernel"]).all()


def test_parameters_that_nobody_reaches_stay_as_they_are(started):
    backend = build(started, Branches(taken=False), weight_decay=0.1)
    before = state_of(backend)["model/branch/kernel"]
    step(backend, global_batch(backend), 0.5)
    np.testing.assert_array_equal(state_of(backend)["model/branch/kernel"], before)


@pytest.mark.parametrize(
    "fields",
    [{"optimizer": "adamw"}, {"optimizer": "lars", "momentum": 0.9, "ema_decay": 0.9}],
    ids=lambda fields: fields["optimizer"],
)
def test_broadcast_gives_every_worker_the_roots_state(started, fields):
    backend = build(started, Mixed(), **fields)
    workers = backend.workers
    for i in range(2):
        step(backend, global_batch(backend, step=i))
    shifted = {
        name: value if name == "optimizer/step" else (value + workers.rank).astype(value.dtype)
        for name, value in state_of(backend).items()
    }
    load(backend, shifted)
    root = workers.size - 1
    backend.broadcast_state(root)
    assert_equal(state_of(backend), workers.broadcast_object(shifted, root))


class OwnOptimizer(Linear):
    """With an optimizer of the task's, which in PyTorch makes its slots in its first step."""

    def torch_optimizer(self, parameters):
        import torch

        return torch.optim.NAdam(parameters, weight_decay=0.1)

    def tf_optimizer(self):
        import keras

        return keras.optimizers.Nadam()


def test_broadcast_gives_the_roots_slots_to_workers_without(started):
    backend = build(started, OwnOptimizer())
    for i in range(2):
        step(backend, global_batch(backend, step=i))
    state = state_of(backend)
    expected = [step(backend, global_batch(backend, step=2 + i)).sums["loss"] for i in range(2)]
    build(started, OwnOptimizer())
    if backend.workers.rank == 0:
        load(backend, state)
    backend.broadcast_state(0)
    found = state_of(backend)
    assert_equal(found, state)
    losses = [step(backend, global_batch(backend, step=2 + i)).sums["loss"] for i in range(2)]
    assert losses == expected


def test_broadcast_before_the_first_step_leaves_the_roots_slots(started):
    backend = build(started, OwnOptimizer())
    expected = state_of(backend)
    backend.broadcast_state(0)
    assert_equal(state_of(backend), expected)


def test_moving_statistics_are_averaged(started):
    backend = build(started, Mixed())
    step(backend, global_batch(backend))
    local = state_of(backend)
    everyone = backend.workers.allgather_object(local)
    backend.sync_statistics()
    for name in ("model/norm/moving_mean", "model/norm/moving_variance"):
        expected = np.mean([state[name] for state in everyone], axis=0)
        np.testing.assert_allclose(state_of(backend)[name], expected, rtol=1e-6)
        if backend.workers.size > 1:
            assert (everyone[0][name] != everyone[1][name]).any()


def test_evaluation_is_exact_with_a_padded_tail(started):
    backend = build(started, Linear())
    kernel, bias = linear(state_of(backend))
    size, count = 5 * started.workers.size, SAMPLES - 1
    totals = evaluated(
        backend,
        [
            global_batch(backend, min(size, count - start), start=start, size=size)
            for start in range(0, count, size)
        ],
    )
    assert totals.weight == count
    expected = gradient(kernel, bias, X[:count], Y[:count])[2]
    assert totals.sums["loss"] / count == pytest.approx(expected, rel=1e-5)


@pytest.mark.local
def test_evaluation_changes_nothing(started):
    backend = build(started, Mixed(), optimizer="adamw")
    before = state_of(backend)
    losses = [evaluated(backend, [global_batch(backend)]).sums["loss"] for _ in range(2)]
    assert losses[0] == losses[1]  # no dropout
    assert_equal(state_of(backend), before)


def test_dropout_is_a_function_of_seed_step_and_rank(started):
    def losses(seed):
        """Return the losses of steps 3 and 4 of a new model, whose parameters stay as they are."""
        backend = build(started, Dropping(), seed=seed)
        return [step(backend, global_batch(backend, step=number), 0.0).sums["loss"] for number in (3, 4)]

    first = losses(0)
    assert losses(0) == first
    assert first[0] != first[1]
    assert losses(1)[0] != first[0]


def test_dropout_differs_between_micro_batches_and_workers(started):
    def outputs(accumulate):
        backend = build(started, Dropping(), accumulate=accumulate)
        same = {"inputs": X[:2], "targets": Y[:2]}
        arrays = {name: np.stack([value] * accumulate) for name, value in same.items()}
        weights = np.ones((accumulate, 2), np.float32)
        host = HostBatch(0, arrays, weights, 2.0 * accumulate * started.workers.size, weights.astype(int))
        return step(backend, next(iter(backend.to_device([host]))), 0.0).sums["loss"]

    one = outputs(1)
    assert outputs(2) != pytest.approx(2 * one, rel=1e-6)
    if started.workers.size > 1:
        rank0 = started.workers.allgather_object(one)[0]
        assert one == rank0  # reduced, so the same on every worker


def test_gathered_state_is_rank_0s_and_not_changed_by_later_steps(started):
    backend = build(started, Linear(), optimizer="adamw")
    step(backend, global_batch(backend))
    before = state_of(backend)
    pending = backend.gather_state()
    assert (pending is None) == (backend.workers.rank != 0)
    for i in range(2):
        step(backend, global_batch(backend, step=1 + i))
    if pending is not None:
        with ThreadPoolExecutor(1) as other_thread:
            state = other_thread.submit(pending.read).result()
        assert state.keys() == before.keys()
        for name, value in state.items():
            np.testing.assert_array_equal(value, before[name], err_msg=name)
        assert (state_of(backend)["model/dense/kernel"] != state["model/dense/kernel"]).any()


def gathered(backend):
    """Give rank 0's state, None on other workers."""
    pending = backend.gather_state()
    return None if pending is None else pending.read()


@pytest.mark.parametrize("task", [Mixed, OwnOptimizer], ids=lambda task: task.__name__)
def test_scattered_state_is_every_workers(started, task):
    backend = build(started, task(), optimizer="adamw")
    step(backend, global_batch(backend))
    state = gathered(backend)
    expected = backend.workers.broadcast_object(state)
    build(started, task(), optimizer="adamw")
    backend.scatter_state(state)
    assert_equal(state_of(backend), expected)
    check_replicas(backend)


def test_a_scattered_state_that_does_not_fit_is_refused_on_every_worker(started):
    backend = build(started, Linear())
    before, state = state_of(backend), gathered(backend)
    if state is not None:
        state = {name: value + 1 for name, value in state.items() if name != "model/dense/bias"}
    with pytest.raises(TaskError, match=r"missing: model/dense/bias \(3,\)"):
        backend.scatter_state(state)
    assert_equal(state_of(backend), before)


@pytest.mark.parametrize("part", ["all", "bias"])
def test_scattered_weights_leave_the_optimizer_as_it_is(started, part):
    backend = build(started, Linear(), optimizer="adamw")
    step(backend, global_batch(backend))
    before = state_of(backend)
    shapes = backend.weight_shapes
    assert {name: value.shape for name, value in before.items() if name in shapes} == shapes
    names = {"all": list(shapes), "bias": ["model/dense/bias"]}[part]
    given = {name: before[name] + 1 for name in names}
    of_state = StatePart.WEIGHTS if part == "all" else StatePart.SOME_WEIGHTS
    backend.scatter_state(given if backend.workers.rank == 0 else None, of_state)
    found = state_of(backend)
    assert found.keys() == before.keys()
    for name, value in found.items():
        np.testing.assert_array_equal(value, given.get(name, before[name]), err_msg=name)
    check_replicas(backend)


@pytest.mark.parametrize(
    ("change", "said"),
    [({"model/other": np.zeros(3)}, "unexpected"), ({"model/dense/bias": np.zeros(4)}, "misshapen")],
)
@pytest.mark.parametrize("part", [StatePart.WEIGHTS, StatePart.SOME_WEIGHTS])
def test_scattered_weights_that_do_not_fit_are_refused_on_every_worker(started, change, said, part):
    backend = build(started, Linear())
    before = state_of(backend)
    given = {name: before[name] + 1 for name in backend.weight_shapes} | change
    with pytest.raises(TaskError, match=f"{said}: {next(iter(change))}"):
        backend.scatter_state(given if backend.workers.rank == 0 else None, part)
    with pytest.raises(TaskError, match="missing: model/dense/kernel"):
        backend.scatter_state({"model/dense/bias": given["model/dense/bias"]}, StatePart.WEIGHTS)
    assert_equal(state_of(backend), before)


@pytest.mark.local
def test_checksums_tell_parameters_apart(started):
    backend = build(started, Linear())
    before = backend.parameter_checksums()
    assert sorted(name for name, _ in before) == ["model/dense/bias", "model/dense/kernel"]
    assert before == backend.parameter_checksums()
    assert before == backend.workers.broadcast_object(before)
    step(backend, global_batch(backend))
    assert all(one != other for one, other in zip(before, backend.parameter_checksums(), strict=True))


@pytest.mark.local
def test_a_model_is_described_by_portable_names(started):
    info = started.build(Mixed(), config(momentum=0.9))
    assert info.batch_norm_layers == 1
    assert info.parameter_shapes["model/conv/kernel"] == (3, 1, 4)
    assert {name for name, _ in started.parameter_checksums()} == set(info.parameter_shapes)
    statistics = {"model/norm/moving_mean", "model/norm/moving_variance"}
    slots = {name.replace("model/", "optimizer/momentum/") for name in info.parameter_shapes}
    assert set(state_of(started)) == {*info.parameter_shapes, *statistics, *slots}


class Renamed(Linear):
    state_names = {"torch": {"dense": "head"}, "tf": {"dense": "head"}}  # noqa: RUF012


@pytest.mark.local
def test_state_names_apply_to_the_model_and_the_optimizer(started):
    state = state_of(build(started, Renamed(), momentum=0.9))
    assert set(state) == {
        f"{part}/head/{role}" for part in ("model", "optimizer/momentum") for role in ("kernel", "bias")
    }
