"""Tasks whose process gets a limit on its address space: before the first batch, or in a later step."""

import resource
from pathlib import Path

import numpy as np
from small_task import Small

from hvdtrain import Callback

SPARE_BYTES = 512 << 20
COPIES = 128  # of 16 MiB each
HEAVY_BYTES = 1 << 30


def limit_memory():
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + SPARE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Filling:
    """A model that takes all memory from some call on."""

    loss = "mse"
    calls, limited_call = 0, 1

    def train_data(self):
        return {"inputs": np.ones((64, 8), np.float32), "targets": np.ones((64, 65536), np.float32)}

    def eval_data(self):
        return None

    def torch_model(self):
        import torch

        task = self

        class Wide(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first = torch.nn.Linear(8, 65536)

            def forward(self, x):
                x = self.first(x)
                return torch.cat([x] * COPIES)[: len(x)] if task.is_limited() else x

        return Wide()

    def tf_model(self):
        import keras

        task = self

        @keras.saving.register_keras_serializable("memory")
        class Copies(keras.layers.Layer):
            def call(self, x):
                return keras.ops.concatenate([x] * COPIES)[:64] if task.is_limited() else x

            def compute_output_shape(self, shape):
                return shape

        self.calls = -COPIES  # Keras calls layers while it makes a model
        inputs = keras.Input((8,))
        model = keras.Model(inputs, Copies()(keras.layers.Dense(65536, name="first")(inputs)))
        self.calls = 0
        return model

    def is_limited(self):
        self.calls += 1
        if self.calls == self.limited_call:
            limit_memory()
        return self.calls >= self.limited_call


class FillingLater(Filling):
    """In the first step of training, not in the dry run."""

    limited_call = 2


class Uneven(Small):
    """A task whose second worker takes much more memory than the first, from the first step on."""

    def callbacks(self):
        return [Ballast()]


class Ballast(Callback):
    """Takes memory, and writes down what its process has had in the end."""

    every_rank = True

    def on_start(self, context):
        self.context = context

    def on_step(self, step, metrics):
        if self.context.rank == 1 and step.step == 2:
            np.ones(HEAVY_BYTES, np.uint8)

    def on_end(self, summary):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        (self.context.run_dir / f"rank-{self.context.rank}").write_text(str(peak))
