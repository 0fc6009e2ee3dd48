"""What a backend with sharded state keeps, skips, saves and loads, at two and more workers.

Run inside a job, one process a worker, with HVDTRAIN_TEST_FRAMEWORK set; ``test_sharded.py`` does so.
"""

import ctypes
import gc
import threading

import numpy as np
import psutil
import pytest
from conformance.zoo import module
from safetensors.numpy import save_file
from support.suite import FRAMEWORK, config, host_batch, on_device, started_backend  # noqa: F401

from hvdtrain.backends.reduction.shards import BUCKET_BYTES
from hvdtrain.checkpoints.storage import Checkpoint

SAMPLES = 12
WIDTH, LAYERS = 1024, 12  # 50 MB
BUCKET = 16 << 20
RANDOM = np.random.RandomState(3)
SHARDED = pytest.mark.parametrize("shard", ["gradients", "optimizer"][: 2 if FRAMEWORK == "torch" else 1])


class Net:
    """A net whose parameters two and three workers do not divide evenly, with kernels of all layouts."""

    loss = "mse"
    metrics = {}  # noqa: RUF012

    def torch_model(self):
        import torch
        from torch import nn

        def forward(self, x):
            x = self.conv(x[:, None]).flatten(2)
            return self.last(self.attention(x, x, x, need_weights=False)[0]).mean(1)

        conv = nn.Conv2d(1, 3, 3).to(memory_format=torch.channels_last)
        attention = nn.MultiheadAttention(12, 2, batch_first=True)
        return module(forward, conv=conv, attention=attention, unused=nn.Linear(3, 5), last=nn.Linear(12, 2))

    def tf_model(self):
        import keras

        class Model(keras.Model):
            def __init__(self):
                super().__init__()
                self.conv = keras.layers.Conv2D(3, 3)
                self.attention = keras.layers.MultiHeadAttention(2, 6)
                self.unused = keras.layers.Dense(5)
                self.unused.build((None, 3))
                self.last = keras.layers.Dense(2)

            def call(self, x):
                x = keras.ops.reshape(self.conv(x[..., None]), (-1, 3, 12))
                return keras.ops.mean(self.last(self.attention(x, x)), 1)

        model = Model()
        model(keras.ops.zeros((1, 5, 6)))
        return model

    def arrays(self):
        return RANDOM.randn(SAMPLES, 5, 6), RANDOM.randn(SAMPLES, 2)


class Large(Net):
    """A net of large layers."""

    def __init__(self, layers=LAYERS):
        self.layers = layers

    def torch_model(self):
        from torch import nn

        return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(self.layers)])

    def tf_model(self):
        import keras

        layers = [keras.layers.Dense(WIDTH) for _ in range(self.layers)]
        return keras.Sequential([keras.Input((WIDTH,)), *layers])

    def arrays(self):
        return RANDOM.randn(SAMPLES, WIDTH), RANDOM.randn(SAMPLES, WIDTH)


class Tiny(Net):
    """A net of eight numbers, of which the first worker has all."""

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(4, 2, bias=False))

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2, use_bias=False)])

    def arrays(self):
        return RANDOM.randn(SAMPLES, 4), RANDOM.randn(SAMPLES, 2)


def trained(backend, shard, steps=3, task=None, scale=1.0, **fields):
    """Build anew and train; give the metrics of each step."""
    RANDOM.seed(3)
    task = task or Net()
    backend.build(task, config(shard=shard, **{"optimizer": "adamw", **fields}))
    backend.broadcast_state(0)
    x, y = (array.astype(np.float32) for array in task.arrays())
    y[-SAMPLES // backend.workers.size :] *= scale
    found = []
    for step in range(steps):
        host = host_batch(backend, {"inputs": x, "targets": y}, SAMPLES, step=step)
        found.append(backend.train_step(on_device(backend, host), 0.01).read())
    return found


def gathered(backend, spool=None):
    pending = backend.gather_state(spool)
    assert (pending is not None) == (backend.workers.rank == 0)
    return {} if pending is None else pending.read()


def assert_equal(found, expected, rtol=0.0):
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        if rtol and name.endswith("attention/key/bias"):  # whose gradient is zero but for rounding
            continue
        np.testing.assert_allclose(found[name], array, rtol=rtol, atol=rtol, err_msg=name)


@pytest.mark.parametrize(("shard", "optimizer"), [("optimizer", "adamw"), ("gradients", "sgd")])
def test_the_state_is_that_of_workers_that_keep_all(started, shard, optimizer, tmp_path):
    options = {"optimizer": optimizer, "ema_decay": 0.9, "weight_decay": 0.01}
    unused = [metrics.unused_parameters for metrics in trained(started, "none", **options)]
    expected = gathered(started)
    assert [metrics.unused_parameters for metrics in trained(started, shard, **options)] == unused
    assert unused[-1]
    for spool in (None, tmp_path / "new"):
        assert_equal(gathered(started, spool), expected, 0.0 if shard == "optimizer" else 1e-5)
    checksums = started.parameter_checksums()
    with started.ema_weights():  # that of all workers
        averages = gathered(started)
    assert started.parameter_checksums() == checksums
    for name in averages:
        if name.startswith("ema/"):
            np.testing.assert_array_equal(averages[name.replace("ema/", "model/", 1)], averages[name])


@pytest.mark.parametrize(
    ("shard", "options"),
    [
        ("gradients", {"clip_norm": 0.1}),
        ("gradients", {"compression": "bf16", "optimizer": "sgd"}),
        ("optimizer", {"precision": "fp16"}),
    ],
)
def test_a_worker_may_have_no_part(started, shard, options):
    trained(started, "none", task=Tiny(), ema_decay=0.9, **options)
    expected = gathered(started)
    trained(started, shard, task=Tiny(), ema_decay=0.9, **options)
    assert_equal(gathered(started), expected, 1e-2 if "compression" in options else 1e-5)


@SHARDED
def test_each_worker_keeps_its_part(started, shard):
    """The sums of sharded gradients travel in another way than those of large gradients, in pieces."""
    numbers = LAYERS * (WIDTH + 1) * WIDTH
    assert 4 * numbers > BUCKET_BYTES
    trained(started, "none", task=Large(), steps=1, ema_decay=0.9)
    expected = gathered(started)
    trained(started, shard, task=Large(), steps=1, ema_decay=0.9)
    everyone = started.workers.allgather_object(kept_numbers(started))
    for slots, averages in everyone:
        assert slots < 1.02 * 2 * numbers / started.workers.size + 1000
        assert averages < 1.02 * numbers / started.workers.size + 1000
    assert sum(averages for _, averages in everyone) == numbers
    if shard == "gradients" and FRAMEWORK == "torch":
        assert all(p.grad is None for p in started.model.parameters())
    assert_equal(gathered(started), expected, 0.0 if started.workers.size == 2 else 1e-5)


def kept_numbers(backend):
    """Return how many numbers this worker's optimizer keeps, and how many its moving average."""
    (optimizer,) = backend.optimizers
    averages = backend.parts.ema._averages
    if FRAMEWORK == "tf":
        slots = [variable for variables in optimizer.slots.values() for variable in variables]
        return [sum(int(np.prod(v.shape)) for v in group) for group in (slots, averages)]
    slots = [value for slots in optimizer.state.values() for value in slots.values()]
    return [sum(value.numel() for value in group) for group in (slots, averages)]


@SHARDED
def test_a_state_that_was_saved_is_loaded(started, shard):
    trained(started, "none", ema_decay=0.9)
    state = gathered(started)
    trained(started, shard, steps=1, ema_decay=0.9)
    started.scatter_state(state if started.workers.rank == 0 else None)
    assert_equal(gathered(started), state)
    if started.workers.rank == 0:
        state = {name: array for name, array in state.items() if not name.startswith("ema/")}
    started.scatter_state(state if started.workers.rank == 0 else None)
    again = gathered(started)
    for name, array in state.items():
        np.testing.assert_array_equal(again[name], array)
        if name.startswith("model/"):
            average = again.get(name.replace("model/", "ema/", 1))
            assert average is None or (average == array).all()


def test_an_overflow_on_one_worker_skips_the_step_on_all(started):
    options, found = {"precision": "fp16", "scale": 2000.0, "steps": 20}, []
    for shard in ("none", "gradients"):
        losses = [metrics.sums["loss"] for metrics in trained(started, shard, **options)]
        scale = float(started.step.update.loss_scale.value)  # each step that was skipped has halved it
        found.append((losses, scale))
    assert found[0][1] == found[1][1] < 2.0**15
    np.testing.assert_allclose(found[1][0], found[0][0], rtol=1e-3)


def test_no_room_for_the_copy_is_an_error_of_reading(started, tmp_path):
    trained(started, "optimizer", steps=1)
    file = tmp_path / "file"
    file.touch()
    pending = started.gather_state(file / "folder")
    if pending is not None:
        with pytest.raises(OSError, match="folder"):
            pending.read()
    assert bool(gathered(started)) == (started.workers.rank == 0)


def test_rank_zero_holds_a_bucket_more_while_it_saves(started, tmp_path):
    trained(started, "optimizer", task=Large(), steps=1)
    gathered(started, tmp_path)  # what Horovod allocates once
    before = anonymous_bytes()
    with Peak() as peak:
        state = gathered(started, tmp_path)
    if started.workers.rank == 0:
        assert sum(array.nbytes for array in state.values()) > 9 * BUCKET
        assert peak.bytes - before < 3 * BUCKET


def test_loading_from_files_takes_a_few_buckets_more_on_any_worker(started, tmp_path):
    trained(started, "gradients", task=Large(2 * LAYERS), steps=1)
    state = gathered(started, tmp_path)
    if started.workers.rank == 0:
        for file in ("model", "optimizer"):
            part = {name: array for name, array in state.items() if name.startswith(f"{file}/")}
            save_file(part, tmp_path / f"{file}.safetensors")
        state = Checkpoint(tmp_path, None).read()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = anonymous_bytes()
    with Peak() as peak:
        started.scatter_state(state)
    ctypes.CDLL(None).malloc_trim(0)
    assert peak.bytes - before < 8 * BUCKET
    assert anonymous_bytes() - before < 2 * BUCKET


class Peak:
    """Samples the memory of this process that no file backs."""

    def __enter__(self):
        self.bytes, self._ended = 0, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self._thread.join()

    def _sample(self):
        while not self._ended.wait(0.001):
            self.bytes = max(self.bytes, anonymous_bytes())


def anonymous_bytes():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared
