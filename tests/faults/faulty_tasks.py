"""Small tasks with something wrong on one worker, for both frameworks."""

import os
import pickle
import signal
import sys
import threading
import time
from functools import partial
from itertools import count
from pathlib import Path

import numpy as np

from hvdtrain.backends import workers

RANK = int(os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0")))
INPUTS, OUTPUTS = 4, 3


class Sound:
    """Nothing wrong: a linear map fitted to random numbers. The others change one thing each."""

    loss = "mse"
    defaults = {"batch_size": 4, "learning_rate": 0.01, "steps": 20, "log_every": 1}  # noqa: RUF012
    outputs = OUTPUTS
    samples = 64

    def train_data(self):
        random = np.random.RandomState(0)
        inputs = random.randn(self.samples, INPUTS).astype("float32")
        return {"inputs": inputs, "targets": random.randn(self.samples, self.outputs).astype("float32")}

    def eval_data(self):
        return None

    def torch_model(self):
        from torch import nn

        return nn.Linear(INPUTS, self.outputs)

    def tf_model(self):
        import keras

        inputs = keras.Input((INPUTS,))
        return keras.Model(inputs, keras.layers.Dense(self.outputs, name="dense")(inputs))


def about_to_fail():
    """Note when a worker fails, for the test to see how long the others go on."""
    # several threads of a process may come here, of which the first ends it
    own = Path(f"failed-at-{threading.get_native_id()}")
    own.write_text(str(time.time()))
    own.replace("failed-at")


class StepsSeen:
    """Counts the steps of a PyTorch model by the values of its bias, which the dry run leaves as they are."""

    def __init__(self, model):
        self.model, self.seen = model, set()

    def number(self):
        """Give the number of the step that is being done, when it is called in each of them."""
        self.seen.add(float(self.model.bias.detach().double().sum()))
        return len(self.seen)


class LossRaises(Sound):
    """On rank 1 the loss raises: in PyTorch at step 2, in TensorFlow when the step is compiled."""

    def torch_model(self):
        self.steps = StepsSeen(model := super().torch_model())
        return model

    def loss(self, outputs, batch):
        in_graph = type(outputs).__name__ == "SymbolicTensor"  # not so in the dry run
        is_torch = type(outputs).__module__.startswith("torch")
        if RANK == 1 and (in_graph or (is_torch and self.steps.number() == 2)):
            self.fail()
        return ((outputs - batch["targets"]) ** 2)[:, 0]

    def fail(self):
        about_to_fail()
        raise_error()


class Exits(LossRaises):
    """In its place, the loss calls sys.exit()."""

    def fail(self):
        sys.exit(0)


class DryRunRaises(Sound):
    """On rank 1 the model raises before its batch norm, in the dry run."""

    def torch_model(self):
        from torch import nn

        class Failing(nn.Module):
            def forward(self, x):
                return about_to_raise(x)

        return nn.Sequential(nn.Linear(INPUTS, OUTPUTS), Failing(), nn.BatchNorm1d(OUTPUTS))


def about_to_raise(x):
    if RANK == 1:
        about_to_fail()
        raise_error()
    return x


class Samples:
    """Samples that are made one by one, each in some time; after so many on one rank, one of them fails."""

    def __init__(self, arrays, seconds=0.0, fails_after=None, rank=1, fail=None):
        self.arrays, self.seconds, self.reads = arrays, seconds, 0
        self.fails_after = fails_after if rank == RANK else None
        self.fail = fail

    def __len__(self):
        return len(self.arrays["inputs"])

    def __getitem__(self, index):
        time.sleep(self.seconds)
        self.reads += 1
        if self.reads == self.fails_after:
            about_to_fail()
            self.fail()
        return {name: array[index] for name, array in self.arrays.items()}


def raise_error():
    raise ValueError("the flux capacitor is empty")


class DataRaises(Sound):
    """On rank 1 the data raises after some batches."""

    def train_data(self):
        return Samples(super().train_data(), fails_after=60, fail=raise_error)


class Slow(Sound):
    """Takes some 50 ms a step, and notes its process, so that a test can step in."""

    defaults = Sound.defaults | {"steps": 100_000}
    failing = {}  # noqa: RUF012

    def train_data(self):
        Path(f"pid-{RANK}").write_text(str(os.getpid()))
        return Samples(super().train_data(), seconds=0.025, **self.failing)


class DataWaits(Slow):
    """On rank 1 a sample never comes."""

    failing = {"fails_after": 121, "fail": partial(time.sleep, 600)}  # noqa: RUF012


class Leaves(Slow):
    """On rank 1 the process ends with the code of success in the middle of training."""

    failing = {"fails_after": 121, "fail": partial(os._exit, 0)}  # noqa: RUF012


class LeavesAlone(Slow):
    """The only worker does so."""

    failing = Leaves.failing | {"rank": 0}


class ModelWaits(Slow):
    """On rank 1 the model waits for ever, in PyTorch."""

    def torch_model(self):
        from torch import nn

        class Waits(nn.Linear):
            calls = 0

            def forward(self, inputs):
                self.calls += 1
                if RANK == 1 and self.calls == 20:
                    about_to_fail()
                    time.sleep(600)
                return super().forward(inputs)

        return Waits(INPUTS, OUTPUTS)


class OtherShape(Sound):
    """A wider model on rank 1."""

    def torch_model(self):
        from torch import nn

        width = 8 if RANK == 1 else 5
        return nn.Sequential(nn.Linear(INPUTS, width), nn.Linear(width, OUTPUTS))


class OtherOrder(Sound):
    """Layers that rank 1 makes in another order, as of a set of names."""

    def torch_model(self):
        from torch import nn

        names = ["b", "a"] if RANK == 1 else ["a", "b"]
        model = nn.Sequential(nn.Linear(INPUTS, OUTPUTS))
        for name in names:
            model[0].register_module(name, nn.Linear(3, 3))
        return model


class SendsPickles(Sound):
    """From the training data on, rank 1 sends pickles in place of objects, as a stranger would."""

    def train_data(self):
        if RANK == 1:
            workers.packed = lambda *_: pickle.dumps(Executed())
        return super().train_data()


class Executed:
    """Unpickled, it makes a file."""

    def __reduce__(self):
        return Path.touch, (Path("executed"),)


class NotANumber(Sound):
    """One target, that of sample 17, is not a number."""

    def train_data(self):
        data = super().train_data()
        data["targets"][17] = np.nan
        return data


class GradientNotANumber(Sound):
    """The loss is finite, and its gradient is not as soon as a batch has sample 17: the root of 0."""

    def train_data(self):
        data = super().train_data()
        data["scale"] = np.ones((self.samples, 1), "float32")
        data["scale"][17] = 0
        return data

    def torch_loss(self, model, batch):
        outputs = model(batch["inputs"]) * batch["scale"]
        return (outputs**2).sum(1).sqrt(), {}


class Drifts(Sound):
    """On rank 1, PyTorch's bias changes by itself at step 4."""

    is_done = False

    def torch_model(self):
        self.steps = StepsSeen(model := super().torch_model())
        return model

    def torch_loss(self, model, batch):
        import torch

        if RANK == 1 and self.steps.number() == 4 and not self.is_done:
            self.is_done = True
            with torch.no_grad():
                model.bias += 1e-6
        return ((model(batch["inputs"]) - batch["targets"]) ** 2).mean(1), {}


class BrokenModel(Sound):
    """On rank 1 the model cannot be built; when data are opened, shortly before, is noted."""

    def train_data(self):
        about_to_fail()
        return super().train_data()

    def torch_model(self):
        if RANK == 1:
            raise ValueError("no weights to start from")
        return super().torch_model()


class LeavesThread(Sound):
    """On rank 1 a thread stays that nobody ends."""

    def train_data(self):
        if RANK == 1:
            threading.Thread(target=time.sleep, args=(600,), name="left behind").start()
        return super().train_data()


class KilledWhileSending(Sound):
    """Rank 1 is killed in a step that has sent gradients of the last layers, and computes others."""

    defaults = Sound.defaults | {"overlap": "true"}

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
    """A checkpoint takes more seconds than the stall limit of test_jobs_end.py."""

    def train_data(self):
        from hvdtrain.checkpoints import storage

        write = storage.write

        def write_slowly(*args):
            time.sleep(20)
            return write(*args)

        storage.write = write_slowly
        return super().train_data()


if __name__ == "__main__":
    import hvdtrain

    hvdtrain.train(LossRaises, framework="torch", run_dir="run")
