"""Tasks for runs in several legs: as slow as the environment asks, so that a test can step in.

Each sample takes ``HVDTRAIN_TEST_SAMPLE_SECONDS``. From the step ``HVDTRAIN_TEST_HELD_FROM`` on, each step
takes a second, so that the job is not over when a test is late to stop or kill it. A file ``released`` in the
job's folder ends that.
"""

import os
import shutil
import time
from pathlib import Path

import numpy as np

from hvdtrain.callbacks import Callback
from hvdtrain.tasks.digits import Digits

# does not change what is computed, so it is no option of the task
SAMPLE_SECONDS = float(os.environ.get("HVDTRAIN_TEST_SAMPLE_SECONDS", "0"))
HELD_FROM = int(os.environ.get("HVDTRAIN_TEST_HELD_FROM", "0"))
RELEASED = "released"
_HELD_SECONDS = 1.0
INPUTS, OUTPUTS = 6, 3


class Samples:
    """Samples that are read one by one, each in some time."""

    def __init__(self, arrays):
        self.arrays = arrays

    def __len__(self):
        return len(self.arrays["inputs"])

    def __getitem__(self, index):
        time.sleep(SAMPLE_SECONDS)
        return {name: array[index] for name, array in self.arrays.items()}


class _Held(Callback):
    """Lets steps take a second, if the environment asks for that."""

    def on_step(self, step, metrics):
        until = time.monotonic() + _HELD_SECONDS
        while 0 < HELD_FROM <= step.step and time.monotonic() < until and not Path(RELEASED).exists():
            time.sleep(0.02)


class Fit:
    """Fit random numbers with two dense layers; nothing in it is random once it is built."""

    loss = "mse"
    inputs, outputs = INPUTS, OUTPUTS
    metrics = {"mae": "mae"}  # noqa: RUF012
    defaults = {  # noqa: RUF012
        "batch_size": 4,
        "learning_rate": 0.01,
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "initial_parameters": "portable",
        "log_every": 1,
        "save_every": 5,
    }

    def __init__(self, samples=50, hidden=16):
        self.samples, self.hidden = samples, hidden

    def train_data(self):
        random = np.random.RandomState(5)
        inputs = random.randn(self.samples, INPUTS).astype("float32")
        return Samples({"inputs": inputs, "targets": random.randn(self.samples, OUTPUTS).astype("float32")})

    def eval_data(self):
        arrays = self.train_data().arrays
        return {name: array[:20] for name, array in arrays.items()}

    def callbacks(self):
        return [_Held()]

    def torch_model(self):
        from torch import nn

        first, last = nn.Linear(self.inputs, self.hidden), nn.Linear(self.hidden, self.outputs)
        return nn.Sequential(first, nn.SiLU(), last)

    def tf_model(self):
        import keras

        inputs = keras.Input((self.inputs,))
        x = keras.layers.Dense(self.hidden, activation="silu", name="0")(inputs)
        return keras.Model(inputs, keras.layers.Dense(self.outputs, name="2")(x))


class Dropping(Fit):
    """Fit random numbers with all that a model carries along: dropout, and moving statistics."""

    def torch_model(self):
        from torch import nn

        return nn.Sequential(
            nn.Linear(INPUTS, self.hidden),
            nn.BatchNorm1d(self.hidden),
            nn.SiLU(),
            nn.Dropout(0.3),
            nn.Linear(self.hidden, OUTPUTS),
        )

    def tf_model(self):
        import keras

        inputs = keras.Input((INPUTS,))
        x = keras.layers.Dense(self.hidden, name="0")(inputs)
        x = keras.layers.Activation("silu")(keras.layers.BatchNormalization(name="1")(x))
        x = keras.layers.Dropout(0.3)(x)
        return keras.Model(inputs, keras.layers.Dense(OUTPUTS, name="4")(x))


class ReadSlowly(Digits):
    """The built-in digits; nothing in their model is random once it is built."""

    def train_data(self):
        data = super().train_data()
        return Samples(data.batch(np.arange(len(data))))

    def callbacks(self):
        return [_Held()]


class CopiedFit(Fit):
    """Copies the run directory after each evaluation, as a backup or an upload does."""

    def callbacks(self):
        return [*super().callbacks(), _Copies()]


class _Copies(Callback):
    def on_start(self, context):
        self.run_dir = context.run_dir

    def on_evaluation(self, step, metrics):
        ignored = shutil.ignore_patterns("checkpoints")  # which the saver changes meanwhile
        shutil.copytree(self.run_dir, "copy", ignore=ignored, dirs_exist_ok=True)
