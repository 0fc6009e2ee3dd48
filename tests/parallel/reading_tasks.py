"""Tasks whose data cost something to read, or cannot all be read, for both frameworks."""

import os
import resource
import sys
from pathlib import Path

import numpy as np

from hvdtrain.errors import BadSampleError

INPUTS, SIZE, EVAL_SIZE = 6, 50, 23
BAD, EVAL_BAD = {0, 7, 8, 31}, {0, 22}
LARGE_WIDTH, LARGE_SIZE, LARGE_BATCH = 1 << 15, 2304, 24  # of 64-bit floats: 576 MiB
LIMIT_BYTES = LARGE_WIDTH * LARGE_SIZE * 8 // 3


class Linear:
    """A linear map; what the others share."""

    loss = "mse"
    inputs, outputs = INPUTS, 1

    def torch_model(self):
        from torch import nn

        return nn.Linear(self.inputs, self.outputs)

    def tf_model(self):
        import keras

        inputs = keras.Input((self.inputs,))
        return keras.Model(inputs, keras.layers.Dense(self.outputs, name="dense")(inputs))


class Files:
    """Samples made one by one, with noise of their seed; some cannot be read."""

    def __init__(self, size, bad):
        self.size, self.bad = size, bad

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if index in self.bad:
            raise BadSampleError(f"photos/{index}.png is cut off")
        inputs = np.random.RandomState(index).randn(INPUTS).astype("float32")
        return {"inputs": inputs, "targets": inputs.sum(keepdims=True)}


class AugmentedFiles(Files):
    def augmented(self, indices, keys):
        samples = [self[int(index)] for index in indices]
        noise = [np.random.default_rng(int(key)).random(INPUTS, np.float32) for key in keys]
        return {
            "inputs": np.stack([s["inputs"] + 0.1 * n for s, n in zip(samples, noise, strict=True)]),
            "targets": np.stack([s["targets"] for s in samples]),
        }


class Damaged(Linear):
    """Some samples cannot be read, of training and of evaluation."""

    metrics = {"mae": "mae"}  # noqa: RUF012
    defaults = {  # noqa: RUF012
        "global_batch_size": 12, "learning_rate": 0.05, "epochs": 2, "log_every": 1, "eval_every": "1epoch",
        "initial_parameters": "portable", "on_bad_sample": "skip", "trace_indices": True, "device": "cpu",
    }  # fmt: skip

    def train_data(self):
        return AugmentedFiles(SIZE, BAD)

    def eval_data(self):
        return Files(EVAL_SIZE, EVAL_BAD)


class OneBad(Damaged):
    """One sample cannot be read; not the first, which is read before training."""

    defaults = Damaged.defaults | {"on_bad_sample": "error"}

    def train_data(self):
        return AugmentedFiles(SIZE, {7})

    def eval_data(self):
        return None


class Large(Linear):
    """Data in a file, three times as large as what the process may still allocate."""

    inputs = LARGE_WIDTH
    defaults = {"batch_size": LARGE_BATCH, "learning_rate": 1e-6, "epochs": 1, "device": "cpu"}  # noqa: RUF012

    def train_data(self):
        path = Path(f"inputs-{os.getpid()}.npy")
        # zeros that take no room on the disk, but as much memory as others
        np.lib.format.open_memmap(path, "w+", np.float64, (LARGE_SIZE, LARGE_WIDTH))
        inputs = np.load(path, mmap_mode="r")
        if "tensorflow" in sys.modules:  # its threads start with its first operation
            import tensorflow as tf

            tf.matmul(tf.zeros((8, 8)), tf.zeros((8, 8)))
        used = int(Path("/proc/self/status").read_text().split("VmData:")[1].split()[0]) * 1024
        resource.setrlimit(resource.RLIMIT_DATA, (used + LIMIT_BYTES, used + LIMIT_BYTES))
        return inputs, np.ones((LARGE_SIZE, 1), np.float32)

    def eval_data(self):
        return None
