"""Gradients that travel as matrices of low rank: alike in both frameworks, with any workers.

Run inside a job as ``suite_reduction.py`` is; ``test_contract.py`` does so.
"""

from functools import partial
from importlib import import_module

import numpy as np
import pytest
from conformance.zoo import module
from support import suite
from support.suite import FOLDER, FRAMEWORK, assert_equal, only_torch, started_backend, state_of  # noqa: F401

from hvdtrain.backends.reduction.low_rank import first_factor, matrix_shape
from hvdtrain.errors import PeerLostError

SAMPLES, SIDE, OUTPUTS, RANK = 12, 6, 10, 2
RANDOM = np.random.RandomState(3)
X = RANDOM.randn(SAMPLES, SIDE, SIDE, 4).astype(np.float32)
Y = RANDOM.randn(SAMPLES, OUTPUTS).astype(np.float32)
KERNELS = ("conv/kernel", "out/kernel")
config = partial(suite.config, initial_parameters="portable")


@pytest.fixture
def failures(monkeypatch):
    return import_module(f"failures_{FOLDER}").Failures(monkeypatch)


class Small:
    """A convolution, whose kernel the frameworks lay out differently, and a dense layer."""

    loss = "mse"

    def torch_model(self):
        from torch import nn

        def forward(self, x):
            return self.out(self.conv(x.movedim(-1, 1)).tanh().mean((2, 3)))

        return module(forward, conv=nn.Conv2d(4, 16, 3), out=nn.Linear(16, OUTPUTS))

    def tf_model(self):
        from keras import Input, Sequential, layers

        return Sequential([
            Input((SIDE, SIDE, 4)), layers.Conv2D(16, 3, activation="tanh", name="conv"),
            layers.GlobalAveragePooling2D(), layers.Dense(OUTPUTS, name="out"),
        ])  # fmt: skip


def build(backend, **fields):
    return backend.build(Small(), config(**{"compression": f"powersgd:{RANK}", **fields}))


def batch(backend, step, accumulate=1):
    host = suite.host_batch(backend, {"inputs": X, "targets": Y}, SAMPLES, accumulate=accumulate, step=step)
    return suite.on_device(backend, host)


def train(backend, steps, **options):
    return [backend.train_step(batch(backend, i, **options), 0.1).read().sums["loss"] for i in steps]


def saved(backend):
    """Collective. Give the state on every worker."""
    pending = backend.gather_state()
    return backend.workers.broadcast_object(None if pending is None else pending.read(), 0)


def fields_of(backend):
    return list(backend._state.model.trainable_fields())


def drawn(backend, step, factor=1.0):
    """Give portable gradients of every worker for a step, each a part of the mean."""
    random = np.random.RandomState(100 + step)
    shapes = {field.path: field.shape for field in fields_of(backend)}
    return [
        {path: factor * random.randn(*shape).astype(np.float32) for path, shape in shapes.items()}
        for _ in range(backend.workers.size)
    ]


def finished(backend, parts):
    """Collective. Give what the reducer makes of this worker's portable gradients, as portable arrays."""
    reducer = backend.parts.reducer
    backend.step.forget()
    fields, own = fields_of(backend), parts[backend.workers.rank]
    if FRAMEWORK == "torch":
        import torch

        entries = [entry for entry in backend._state.model.entries if entry.trainable]
        by_tensor = {id(field.tensors[0]): field for field in fields}
        found = {}
        tensors = [
            torch.from_numpy(
                np.array(by_tensor[id(e.tensor)].layout.from_portable(own[e.path])[0], order="C")
            )
            for e in entries
        ]
        for entry, tensor in zip(entries, reducer.finish(tensors)[0], strict=True):
            found[entry.path] = by_tensor[id(entry.tensor)].layout.to_portable([tensor.numpy()])
        return found
    import tensorflow as tf

    if not hasattr(reducer, "traced"):
        reducer.traced = tf.function(lambda given: reducer.finish(given)[0], autograph=False)
    sums = reducer.traced([tf.constant(own[field.path]) for field in fields])
    return {field.path: tensor.numpy() for field, tensor in zip(fields, sums, strict=True)}


class Reference:
    """PowerSGD of the mean gradient in numpy: only the spaces that P and Q span matter."""

    def __init__(self, shapes):
        self.shapes = {path: matrix_shape(shape, RANK) for path, shape in shapes.items()}
        self.q = {p: first_factor(p, s[1], RANK, 0).astype(np.float64) for p, s in self.shapes.items() if s}
        self.error = {p: np.zeros(s) for p, s in self.shapes.items() if s}

    def finish(self, total):
        found = dict(total)
        for path, error in self.error.items():
            moment = total[path].reshape(error.shape) + error
            p, _ = np.linalg.qr(moment @ self.q[path])
            sent = p @ (p.T @ moment)
            self.q[path], _ = np.linalg.qr(moment.T @ p)
            self.error[path] = moment - sent
            found[path] = sent.reshape(total[path].shape)
        return found


def summed(parts):
    return {path: sum(part[path].astype(np.float64) for part in parts) for path in parts[0]}


def test_sums_and_errors_are_those_of_the_mean_gradient(started):
    build(started)
    reference = Reference({field.path: field.shape for field in fields_of(started)})
    assert {path for path, shape in reference.shapes.items() if shape} == set(KERNELS)
    for step in range(6):
        parts = drawn(started, step)
        expected, found = reference.finish(summed(parts)), finished(started, parts)
        for path, value in expected.items():
            np.testing.assert_allclose(found[path], value, atol=2e-5, err_msg=f"{path}, step {step}")
    state = saved(started)
    for path, error in reference.error.items():
        np.testing.assert_allclose(state[f"compression/error/{path}"].reshape(error.shape), error, atol=1e-4)


def test_in_the_warmup_gradients_and_errors_travel_whole(started):
    build(started)
    parts = drawn(started, 0)
    first = finished(started, parts)
    left = {path: summed(parts)[path] - first[path] for path in KERNELS}
    started.parts.reducer.follow(True)
    parts = drawn(started, 1)
    found, total = finished(started, parts), summed(parts)
    for path, value in total.items():
        np.testing.assert_allclose(found[path], value + left.get(path, 0), atol=1e-5)
    assert all(not saved(started)[f"compression/error/{path}"].any() for path in KERNELS)


def test_gradients_that_are_not_finite_change_neither_error_nor_q(started):
    build(started)
    finished(started, drawn(started, 0))
    before = saved(started)
    for value in (np.nan, np.inf):
        parts = drawn(started, 1)
        parts[-1]["conv/kernel"][0, 0, 0, 0] = value
        assert not np.isfinite(finished(started, parts)["conv/kernel"]).all()
    parts[-1] = drawn(started, 1)[-1]
    parts[-1]["out/bias"][0] = np.nan  # which travels uncompressed
    assert np.isnan(finished(started, parts)["out/bias"][0])
    after = saved(started)
    for path in KERNELS:
        np.testing.assert_array_equal(after[f"compression/q/{path}"], before[f"compression/q/{path}"])
        np.testing.assert_allclose(
            after[f"compression/error/{path}"], before[f"compression/error/{path}"], rtol=1e-6, atol=1e-7
        )


def test_a_gradient_of_zero_gives_zero_and_the_next_step_finds_its_directions(started):
    build(started)
    parts = [{path: 0 * value for path, value in part.items()} for part in drawn(started, 0)]
    for _ in range(2):
        assert not any(value.any() for value in finished(started, parts).values())
    q = saved(started)["compression/q/out/kernel"]
    np.testing.assert_allclose(q.T @ q, np.eye(RANK), atol=1e-6)
    assert np.abs(finished(started, drawn(started, 1))["out/kernel"]).max() > 0.1


def test_training_goes_on_from_what_was_saved(started):
    fields = {"ema_decay": 0.9, "clip_norm": 0.1, "optimizer": "lamb"}
    build(started, **fields)
    train(started, range(3))
    state = saved(started)
    assert {f"compression/error/{path}" for path in KERNELS} < set(state)
    assert state["compression/error/conv/kernel"].shape == (3, 3, 4, 16)
    expected = train(started, range(3, 6))
    end = saved(started)
    build(started, **fields)
    started.scatter_state(state if started.workers.rank == 0 else None)
    np.testing.assert_allclose(train(started, range(3, 6)), expected, rtol=1e-6)
    for name, value in saved(started).items():
        np.testing.assert_allclose(value, end[name], rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_state_without_errors_starts_from_none(started):
    build(started)
    train(started, range(3))
    state = saved(started)
    rest = {name: value for name, value in state.items() if not name.startswith("compression/")}
    started.scatter_state(rest if started.workers.rank == 0 else None)
    after = saved(started)
    for path in KERNELS:
        assert not after[f"compression/error/{path}"].any()
        shape = matrix_shape(after[f"compression/error/{path}"].shape, RANK)
        np.testing.assert_array_equal(after[f"compression/q/{path}"], first_factor(path, shape[1], RANK, 0))


@pytest.mark.parametrize("precision", ["bf16", "fp16"] if FRAMEWORK == "torch" else ["fp16"])
def test_half_precision_trains(started, precision):
    build(started, precision=precision)
    losses = train(started, range(8))
    assert np.isfinite(losses).all()
    assert losses[-1] < losses[0]


@only_torch  # which accumulates is no reducer's part
def test_accumulated_gradients_are_compressed_once_a_step(started):
    build(started)
    expected = train(started, range(4))
    build(started, accumulate=2)
    np.testing.assert_allclose(train(started, range(4), accumulate=2), expected, rtol=1e-4)


def local(backend):
    """Give what this worker goes on from."""
    state = {name: one.numpy() for name, one in backend.parts.reducer.tensors.items()}
    return {name: np.array(v) for name, v in {**state, **state_of(backend)}.items()}


def test_a_reduction_that_fails_leaves_a_step_undone(started, failures):
    if started.workers.size == 1:
        return

    def trained(disturbed):
        build(started, momentum=0.9)
        losses, place = [], 0
        for step in range(3):
            before = local(started)
            for place in range(9) if disturbed else (None,):
                failures.fail(place)
                try:
                    losses += train(started, [step])
                    break
                except PeerLostError:
                    failures.fail(None)
                    failures.settle(started)
                    for name, value in local(started).items():
                        np.testing.assert_array_equal(value, before[name], err_msg=f"{name}, {place}")
            failures.fail(None)
        return losses, local(started), place

    losses, state, _ = trained(disturbed=False)
    found_losses, found, places = trained(disturbed=True)
    assert places == {"torch": 4, "tf": 2}[FRAMEWORK]  # PyTorch begins two sums, and waits for each
    assert found_losses == losses
    for name, value in state.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@only_torch
def test_memory_layouts_do_not_change_what_is_learnt(started):
    """The optimizer is fused, and goes through the memory of parameters and gradients."""

    class LastChannels(Small):
        def torch_model(self):
            import torch

            return super().torch_model().to(memory_format=torch.channels_last)

    def trained(task):
        started.build(task, config(compression=f"powersgd:{RANK}", momentum=0.9))
        return train(started, range(6)), saved(started)

    (losses, state), (expected_losses, expected) = trained(LastChannels()), trained(Small())
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    for name, value in state.items():
        np.testing.assert_allclose(value, expected[name], atol=1e-4, err_msg=name)
