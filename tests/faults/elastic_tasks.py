"""A task for elastic jobs: small, slow enough to be disturbed, and killed at exact places on request.

The variable ``HVDTRAIN_TEST_POINTS`` lists places as ``name@rank#count!signal``, separated by commas: the
``count``-th time that the worker of that rank gets there, it sends itself the signal, once in the whole job.
"""

import importlib
import os
import re
import signal
import time
from pathlib import Path

import numpy as np

from hvdtrain import Callback

SAMPLES, INPUTS, OUTPUTS = 480, 6, 3
STEP_SECONDS = float(os.environ.get("HVDTRAIN_TEST_STEP_SECONDS", "0.01"))
START_SECONDS = float(os.environ.get("HVDTRAIN_TEST_START_SECONDS", "0"))

# name to module, and name in it, of what is wrapped
PLACES = {
    "evaluating": ("hvdtrain.loop", "evaluate"),
    "writing": ("hvdtrain.checkpoints.storage", "write"),
    "saving": ("hvdtrain.loop", "save"),
    "entering": ("hvdtrain.backends.workers", "HorovodWorkers.restart"),
    "syncing": ("{backend}", "{Backend}.broadcast_state"),
    "stepping": ("{backend}", "{Backend}.train_step"),
    "reducing": ("horovod.torch", "synchronize"),
    "warming": ("{backend}", "{Backend}.warm_up"),
}
_POINT = re.compile(r"(\w+)@(\d+)#(\d+)!(\d+)")


def _at(point: str, count: int) -> None:
    name, rank, wanted, number = _POINT.fullmatch(point).groups()
    if count < int(wanted) or os.environ.get("HOROVOD_RANK", "0") != rank:
        return
    try:
        os.close(os.open(f"reached-{name}-{rank}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    Path("disturbed-at").write_text(str(time.time()))
    os.kill(os.getpid(), int(number))
    if int(number) == signal.SIGKILL:
        time.sleep(60)


def _wrap(point: str, framework: str) -> None:
    names = {"torch": "Torch", "tensorflow": "TensorFlow"}
    module, path = (
        text.format(backend=f"hvdtrain.backends.{framework}.backend", Backend=f"{names[framework]}Backend")
        for text in PLACES[_POINT.fullmatch(point)[1]]
    )
    *owners, name = path.split(".")
    owner = importlib.import_module(module)
    for part in owners:
        owner = getattr(owner, part)
    inner, calls = getattr(owner, name), [0]

    def wrapped(*args, **kwargs):
        calls[0] += 1
        _at(point, calls[0])
        return inner(*args, **kwargs)

    setattr(owner, name, wrapped)


class Slowly(Callback):
    """Each step takes a while."""

    every_rank = True

    def on_step(self, step, metrics):
        time.sleep(STEP_SECONDS)


class Steady:
    """A map of random numbers; what it learns does not depend on the number of workers."""

    loss = "mse"
    defaults = {  # noqa: RUF012
        "global_batch_size": 24,
        "learning_rate": 0.02,
        "momentum": 0.9,
        "epochs": 5,
        "log_every": 1,
        "eval_every": "1epoch",
        "save_every": 25,
        "keep_last": 3,
        "warmup_epochs": 1,
        "lr_schedule": "cosine",
        "trace_indices": True,
        "initial_parameters": "portable",
        "stall_timeout": 10,
    }

    def __init__(self) -> None:
        time.sleep(START_SECONDS)

    def train_data(self):
        import sys

        framework = "torch" if "hvdtrain.backends.torch.backend" in sys.modules else "tensorflow"
        for point in filter(None, os.environ.get("HVDTRAIN_TEST_POINTS", "").split(",")):
            _wrap(point, framework)
        return self._data(0, SAMPLES)

    def eval_data(self):
        return self._data(1, 40)

    def _data(self, seed, samples):
        random = np.random.RandomState(seed)
        inputs = random.randn(samples, INPUTS).astype("float32")
        return {"inputs": inputs, "targets": np.tanh(inputs[:, :OUTPUTS] * 2)}

    def callbacks(self):
        return [Slowly()]

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(INPUTS, 16), nn.Tanh(), nn.Linear(16, OUTPUTS))

    def tf_model(self):
        import keras

        return keras.Sequential(
            [
                keras.Input((INPUTS,)),
                keras.layers.Dense(16, activation="tanh"),
                keras.layers.Dense(OUTPUTS),
            ]
        )
