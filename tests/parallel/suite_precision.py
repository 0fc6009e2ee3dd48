"""What half precision, recomputed blocks and compiled models must do, at one and two workers.

Run inside a job, one process a worker; ``test_precision.py`` does so for every framework.
"""

import math
import time

import numpy as np
import pytest
from conformance.zoo import module
from support import suite
from support.suite import FRAMEWORK, started_backend, state_of  # noqa: F401

from hvdtrain.errors import EnvironmentFault, TaskError

INPUTS, OUTPUTS, SAMPLES = 5, 3, 12
RANDOM = np.random.RandomState(3)
X = RANDOM.randn(SAMPLES, INPUTS).astype(np.float32)
Y = RANDOM.randn(SAMPLES, OUTPUTS).astype(np.float32)


class Net:
    """Two dense layers; ``seen`` holds the types of what the loss was given."""

    metrics = {}  # noqa: RUF012
    seen = ()

    def loss(self, outputs, batch):
        if FRAMEWORK == "torch":
            self.seen = (*self.seen, str(outputs.dtype).removeprefix("torch."))
            return ((outputs - batch["targets"]) ** 2).mean(1)
        import tensorflow as tf

        self.seen = (*self.seen, outputs.dtype.name)
        return tf.reduce_mean((outputs - batch["targets"]) ** 2, 1)

    def torch_model(self):
        from torch import nn

        def forward(self, x):
            return self.last(self.norm(self.first(x)))

        first, last = nn.Linear(INPUTS, 16), nn.Linear(16, OUTPUTS)
        return module(forward, first=first, norm=nn.LayerNorm(16, eps=1e-3), last=last)

    def tf_model(self):
        import keras
        from keras import layers

        inputs = keras.Input((INPUTS,))
        x = layers.LayerNormalization(epsilon=1e-3, name="norm")(layers.Dense(16, name="first")(inputs))
        return keras.Model(inputs, layers.Dense(OUTPUTS, name="last")(x))


def build(backend, task, **fields):
    suite.build(backend, task, **{"momentum": 0.0, **fields})
    return backend


def scale_of(backend):
    return float(backend.step.update.loss_scale.value)


def batch(backend, x, y, step=0, accumulate=1):
    """Give this worker's part of a global batch."""
    host = suite.host_batch(backend, {"inputs": x, "targets": y}, len(x), accumulate=accumulate, step=step)
    return suite.on_device(backend, host)


def losses(backend, steps, learning_rate=0.1, *, accumulate=1, x=X, y=Y):
    """Train; give the mean loss of each step."""
    found = []
    for i in range(steps):
        totals = backend.train_step(batch(backend, x, y, i, accumulate), learning_rate).read()
        found.append(totals.sums["loss"] / totals.weight)
    return np.array(found)


def test_bf16_computes_in_bf16_and_gives_the_loss_fp32(started):
    def found_in(precision):
        task = Net()
        backend = build(started, task, precision=precision)
        trained = losses(backend, 8)
        evaluated = backend.eval_metrics(backend.eval_step(batch(backend, X, Y))).read().sums["loss"]
        return trained, evaluated, set(task.seen)

    fp32, bf16 = found_in("fp32"), found_in("bf16")
    assert fp32[2] == bf16[2] == {"float32"}
    np.testing.assert_allclose(bf16[0], fp32[0], rtol=0.03)
    assert (np.abs(bf16[0] / fp32[0] - 1) > 1e-5).any()  # or nothing was rounded to bf16
    assert bf16[1] == pytest.approx(fp32[1], rel=0.03)
    assert bf16[1] != pytest.approx(fp32[1], rel=1e-6)


def test_the_state_of_a_half_precision_run_is_fp32_and_fits_any_precision(started):
    backend = build(started, Net(), precision="bf16", optimizer="adamw")
    losses(backend, 2)
    state = state_of(backend)
    kinds = {name: value.dtype for name, value in state.items() if value.dtype != np.float32}
    assert kinds == {"optimizer/step": np.int64}
    build(started, Net(), optimizer="adamw")._state.load(state)
    suite.assert_equal(state_of(started), state)
    if FRAMEWORK == "tf":  # what is made afterwards is fp32 again
        import keras

        assert keras.config.dtype_policy().name == "float32"


def test_fp16_follows_fp32_once_the_scale_fits(started):
    backend = build(started, Net(), precision="fp16", optimizer="adamw", clip_norm=1.0)
    found = losses(backend, 12, 0.01)
    skipped = round(math.log2(2.0**16 / scale_of(backend)))  # each has halved it
    expected = losses(build(started, Net(), optimizer="adamw", clip_norm=1.0), 12 - skipped, 0.01)
    np.testing.assert_allclose(found[skipped:], expected, rtol=0.02)


def test_an_overflow_on_one_worker_skips_the_step_on_all(started):
    backend = build(started, Net(), precision="fp16", optimizer="adamw")
    y = Y.copy()
    y[-SAMPLES // backend.workers.size :] *= 2000  # the last rank's: its gradients overflow at first
    before, skipped = state_of(backend), 0
    while not state_of(backend)["optimizer/step"]:
        suite.assert_equal(state_of(backend), before)
        assert scale_of(backend) == 2.0**16 / 2**skipped
        assert np.isfinite(losses(backend, 1, y=y)).all()
        skipped += 1
    skipped -= 1
    assert 2 <= skipped < 16
    facts = backend.workers.allgather_object((skipped, scale_of(backend)))
    assert set(facts) == {(skipped, 2.0**16 / 2**skipped)}
    after = [state["model/last/kernel"] for state in backend.workers.allgather_object(state_of(backend))]
    for kernel in after:
        np.testing.assert_array_equal(kernel, after[0])
        assert (kernel != before["model/last/kernel"]).any()


def test_a_scale_that_cannot_fall_further_gives_up(started):
    """Gradients that are no numbers at any scale must not be skipped for ever."""
    backend = build(started, Net(), precision="fp16")
    x = X.copy()
    x[0, 0] = 6e4  # finite as fp16, its loss finite as fp32; its gradient is not
    found = []
    while len(found) < 20 and not (found and found[-1].overflow_exhausted):
        found.append(backend.train_step(batch(backend, x, Y * 1e6), 0.1).read())
    assert found[-1].overflow_exhausted
    assert np.isfinite([metrics.sums["loss"] for metrics in found]).all()
    assert len(found) == 17  # 2 ** 16 halved to 1, and once more


def test_the_scale_grows_again(started):
    backend = build(started, Net(), precision="fp16")
    update = backend.step.update
    update.loss_scale = type(update.loss_scale)(backend.workers, initial=8.0, growth_interval=3)
    losses(backend, 7)
    assert scale_of(backend) == 32.0


@pytest.mark.local
def test_the_worker_keeps_to_its_threads(started):
    """With one thread, no more than one core is busy in a computation that would take more."""
    import torch

    value = torch.ones(1500, 1500)
    value @ value
    wall, busy = time.perf_counter(), time.process_time()
    for _ in range(6):
        value @ value
    assert time.process_time() - busy < 1.3 * (time.perf_counter() - wall)


class Blocks(Net):
    """Three blocks with what can go wrong when they are computed twice: dropout, batch norm, own weights."""

    def __init__(self, *, marked=True, width=16, blocks=3, factor=2, dropout=0.3):
        self.marked, self.width, self.blocks, self.factor = marked, width, blocks, factor
        self.dropout = dropout

    def torch_model(self):
        import torch
        from torch import nn
        from torch.nn import functional as F

        width, count, inner, rate = self.width, self.blocks, self.width * self.factor, self.dropout

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.gain = nn.Parameter(torch.ones(width))
                self.up = nn.Linear(width, inner)
                self.norm = nn.BatchNorm1d(inner, momentum=0.1, eps=1e-3)
                self.drop = nn.Dropout(rate)
                self.down = nn.Linear(inner, width)

            def forward(self, x):
                return x + self.down(self.drop(F.silu(self.norm(self.up(x * self.gain)))))

        if self.marked:
            Block.recompute = True

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

        blocks = nn.ModuleList(Block() for _ in range(count))
        return module(forward, first=nn.Linear(INPUTS, width), blocks=blocks, last=nn.Linear(width, OUTPUTS))

    def tf_model(self):
        import keras
        from keras import layers

        width, inner, rate = self.width, self.width * self.factor, self.dropout

        class Block(layers.Layer):
            def __init__(self, **settings):
                super().__init__(**settings)
                self.up = layers.Dense(inner)
                self.norm = layers.BatchNormalization(momentum=0.9, epsilon=1e-3)
                self.drop = layers.Dropout(rate)
                self.down = layers.Dense(width)

            def build(self, shape):
                self.gain = self.add_weight(shape=(width,), initializer="ones", name="gain")

            def call(self, x):
                return x + self.down(self.drop(keras.ops.silu(self.norm(self.up(x * self.gain)))))

        if self.marked:
            Block.recompute = True
        inputs = keras.Input((INPUTS,))
        x = layers.Dense(width, name="first")(inputs)
        for i in range(self.blocks):
            x = Block(name=f"block{i}")(x)
        return keras.Model(inputs, layers.Dense(OUTPUTS, name="last")(x))


@pytest.mark.parametrize(("marked", "accumulate", "precision"), [(True, 2, "bf16"), (False, 1, "fp32")])
def test_recomputed_blocks_change_no_number(started, marked, accumulate, precision):
    def trained(checkpoint_activations):
        backend = build(
            started, Blocks(marked=marked), accumulate=accumulate, precision=precision,
            checkpoint_activations=checkpoint_activations,
        )  # fmt: skip
        return losses(backend, 6, accumulate=accumulate), state_of(backend)

    expected, state = trained(False)
    found, found_state = trained(True)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert sum(name.endswith("moving_mean") for name in state) == 3
    suite.assert_equal(found_state, state, rtol=1e-5, atol=1e-6)


def test_what_cannot_be_recomputed_is_refused(started):
    class Adding(Blocks):
        def tf_model(self):
            model = super().tf_model()
            model.get_layer("block1").down.activity_regularizer = lambda outputs: outputs**2
            return model

    with pytest.raises(TaskError) as caught:
        build(started, Net(), checkpoint_activations=True)
    assert "recompute = True" in caught.value.remedy
    if FRAMEWORK == "tf":  # modules of PyTorch add none
        with pytest.raises(TaskError, match="the block block1 adds losses"):
            losses(build(started, Adding(), checkpoint_activations=True), 1)


def peak_mib():
    """Give the most memory that the process has held."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


@pytest.mark.local
def test_recomputed_blocks_take_less_memory(started):
    x, y = np.resize(X, (4096, INPUTS)), np.resize(Y, (4096, OUTPUTS))
    losses(build(started, Blocks(), checkpoint_activations=True), 1)  # loads what this takes
    before, more = peak_mib(), {}
    for recomputed in (True, False):  # in this order: the process keeps what it got
        backend = build(started, Blocks(width=32, blocks=6, factor=16), checkpoint_activations=recomputed)
        losses(backend, 2, x=x, y=y)
        more[recomputed] = peak_mib() - before
    # of each block, several arrays of 8 MiB; a block alone needs some of them all the same
    assert more[False] > 1.25 * more[True], more


@pytest.fixture(scope="module")
def _compiler(started):
    """Compile something once: what compilers leave in a process is then there before a test begins."""
    if FRAMEWORK == "torch":
        tqdm = pytest.importorskip("tqdm").tqdm
        tqdm.monitor_interval = 0  # PyTorch's compiler shows its progress with it; its thread would stay
    build(started, Net(), compile=True)


# with PyTorch it takes its time, and does the same at any number of workers
@pytest.mark.usefixtures("_compiler")
@(pytest.mark.local if FRAMEWORK == "torch" else lambda test: test)
def test_a_compiled_model_changes_no_number(started):
    # XLA draws other numbers for dropout; PyTorch's compiler is told to draw the same
    task = Blocks(blocks=1, dropout=0.3 if FRAMEWORK == "torch" else 0.0)

    def trained(**fields):
        backend = build(started, task, accumulate=2, checkpoint_activations=True, **fields)
        found = list(losses(backend, 4, accumulate=2))
        evaluated = backend.eval_metrics(backend.eval_step(batch(backend, X, Y))).read()
        return [*found, evaluated.sums["loss"] / SAMPLES], state_of(backend)

    (found, compiled), (expected, state) = trained(compile=True), trained()
    np.testing.assert_allclose(found, expected, rtol=1e-4)
    suite.assert_equal(compiled, state, rtol=1e-3, atol=1e-5)


def test_a_missing_compiler_is_said_before_training(started, monkeypatch):
    if FRAMEWORK == "torch":
        monkeypatch.setenv("CXX", "/nowhere/g++")
        with pytest.raises(EnvironmentFault) as caught:
            build(started, Net(), compile=True)
        assert "/nowhere/g++" in caught.value.problem
