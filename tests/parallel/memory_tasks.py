"""Tasks whose process gets a limit on its address space: before the first batch, or in a later step."""

import resource
from pathlib import Path

import numpy as np

SPARE_BYTES = 160 << 20
LAYERS = 30  # of 16 MiB of activations each


def limit_memory():
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (in_use + SPARE_BYTES, resource.getrlimit(resource.RLIMIT_AS)[1]))


class Early:
    loss = "mse"
    limits_at_call = 1

    def __init__(self):
        self.calls = 0

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
                task.call()
                x = self.first(x)
                for _ in range(LAYERS):
                    x = torch.tanh(x)
                return x

        return Wide()

    def tf_model(self):
        import keras

        x = inputs = keras.Input((8,))
        x = keras.layers.Dense(65536, name="first")(x)
        for _ in range(LAYERS):
            x = keras.layers.Activation("tanh")(x)
        limit_memory()
        return keras.Model(inputs, x)

    def call(self):
        self.calls += 1
        if self.calls == self.limits_at_call:
            limit_memory()


class Late(Early):
    limits_at_call = 3
