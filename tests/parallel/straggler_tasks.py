"""Tasks with one slow worker."""

import os
import time

import numpy as np

SLOW_SECONDS = 0.15  # in each step: much more than all else in it, also on a busy machine
SLOW_RANK = 1
FAILS_IN_STEP = 6  # in the job of Breaks


def is_slow() -> bool:
    rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
    return int(rank or 0) == SLOW_RANK


class SlowLoss:
    """A task whose loss is slow on one worker."""

    def train_data(self):
        inputs = np.arange(4096) % 7 / 7
        return np.repeat(inputs[:, None], 8, 1).astype(np.float32), (np.arange(4096) % 3).astype(np.float32)

    def eval_data(self):
        return None

    def torch_model(self):
        import torch

        return torch.nn.Linear(8, 1)

    def torch_loss(self, model, batch):
        if is_slow():
            time.sleep(SLOW_SECONDS)
        return (model(batch["inputs"])[:, 0] - batch["targets"]) ** 2, {}

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((8,)), keras.layers.Dense(1)])

    def tf_loss(self, model, batch):
        import tensorflow as tf

        def wait(array):
            time.sleep(SLOW_SECONDS * is_slow())
            return array

        inputs = tf.ensure_shape(tf.numpy_function(wait, [batch["inputs"]], tf.float32), (None, 8))
        return (model(inputs)[:, 0] - batch["targets"]) ** 2, {}


class Breaks(SlowLoss):
    """Its slow worker fails in a step."""

    def __init__(self):
        self.biases = set()

    def torch_loss(self, model, batch):
        self.biases.add(float(model.bias.detach()))  # each step changes it, and the dry run does not
        if is_slow() and len(self.biases) == FAILS_IN_STEP:
            raise ValueError("broken on purpose")
        return super().torch_loss(model, batch)
