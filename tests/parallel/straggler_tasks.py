"""Tasks with one slow worker: in its loss, or in reading its data."""

import os
import time

import numpy as np

SLOW_SECONDS = 0.15  # in each step: much more than all else in it, also on a busy machine
SLOW_RANK = 1


def is_slow() -> bool:
    rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    return int(rank or 0) == SLOW_RANK


class Samples:
    """Samples of which each takes a time on one worker."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __len__(self) -> int:
        return 4096

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        if self._seconds and is_slow():
            time.sleep(self._seconds)
        return {"inputs": np.full(8, index % 7 / 7, np.float32), "targets": np.float32(index % 3)}


class SlowData:
    """A task whose data are slow to read on one worker: SLOW_SECONDS for 4 samples with one thread."""

    sample_seconds = SLOW_SECONDS / 4

    def train_data(self):
        return Samples(self.sample_seconds)

    def eval_data(self):
        return None

    def torch_model(self):
        import torch

        return torch.nn.Linear(8, 1)

    def torch_loss(self, model, batch):
        return (model(self.delayed_torch(batch["inputs"]))[:, 0] - batch["targets"]) ** 2, {}

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

    def tf_loss(self, model, batch):
        return (model(self.delayed_tf(batch["inputs"]))[:, 0] - batch["targets"]) ** 2, {}

    def delayed_torch(self, inputs):
        return inputs

    def delayed_tf(self, inputs):
        return inputs


class SlowLoss(SlowData):
    """A task whose loss is slow on one worker."""

    sample_seconds = 0.0

    def delayed_torch(self, inputs):
        if is_slow():
            time.sleep(SLOW_SECONDS)
        return inputs

    def delayed_tf(self, inputs):
        import tensorflow as tf

        def wait(array):
            time.sleep(SLOW_SECONDS)
            return array

        if not is_slow():
            return inputs
        delayed = tf.numpy_function(wait, [inputs], tf.float32)
        delayed.set_shape(inputs.shape)
        return delayed
