"""Tasks whose jobs should end well, or with a message, whatever they leave behind or do on rank 1."""

import os
import signal
import sys
import threading
import time
from itertools import count
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from faulty_tasks import INPUTS, RANK, Slow, Sound, StepsSeen, about_to_fail  # noqa: F401

SAVE_SECONDS = 20  # more than the stall limit of test_jobs_end.py


class LeavesThread(Sound):
    """On rank 1 a thread stays that nobody ends."""

    def train_data(self):
        if RANK == 1:
            threading.Thread(target=time.sleep, args=(600,), name="left behind").start()
        return super().train_data()


class Exits(Sound):
    """On rank 1 the loss calls sys.exit(): in PyTorch at step 2, in TensorFlow when the step is compiled."""

    def torch_model(self):
        self.steps = StepsSeen(model := super().torch_model())
        return model

    def loss(self, outputs, batch):
        in_graph = type(outputs).__name__ == "SymbolicTensor"  # not so in the dry run
        is_torch = type(outputs).__module__.startswith("torch")
        if RANK == 1 and (in_graph or (is_torch and self.steps.number() == 2)):
            sys.exit(0)
        return ((outputs - batch["targets"]) ** 2)[:, 0]


class KilledWhileSending(Sound):
    """Rank 1 is killed in a step that has sent gradients of the last layers, and computes others."""

    defaults = {**Sound.defaults, "overlap": "true"}  # noqa: RUF012

    def torch_model(self):
        from torch import nn

        model = nn.Sequential(nn.Linear(INPUTS, 1024), nn.Linear(1024, 1024), nn.Linear(1024, self.outputs))
        passes = count()  # the first ones are not those of steps

        def die(_):
            if RANK == 1 and next(passes) == 8:
                about_to_fail()
                os.kill(os.getpid(), signal.SIGKILL)

        model[0].bias.register_hook(die)
        return model


class SavesSlowly(Sound):
    """A checkpoint takes some seconds, as on a busy file system."""

    def train_data(self):
        from hvdtrain.checkpoints import storage

        write = storage.write

        def write_slowly(*args):
            time.sleep(SAVE_SECONDS)
            return write(*args)

        storage.write = write_slowly
        return super().train_data()
