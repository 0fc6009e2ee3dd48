"""Small tasks with something wrong on one worker, for both frameworks."""

import os
import pickle
import threading
import time
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
            about_to_fail()
            raise ValueError("the flux capacitor is empty")
        return ((outputs - batch["targets"]) ** 2)[:, 0]


class DryRunRaises(Sound):
    """On rank 1 the model raises before its batch norm, in the dry run."""

    def torch_model(self):
        from torch import nn

        class Failing(nn.Module):
            def forward(self, x):
                return about_to_raise(x)

        return nn.Sequential(nn.Linear(INPUTS, OUTPUTS), Failing(), nn.BatchNorm1d(OUTPUTS))

    def tf_model(self):
        import keras

        class Failing(keras.layers.Layer):
            def call(self, x):
                return x if keras.backend.is_keras_tensor(x) else about_to_raise(x)

            def compute_output_shape(self, shape):
                return shape

        inputs = keras.Input((INPUTS,))
        hidden = Failing()(keras.layers.Dense(OUTPUTS)(inputs))
        return keras.Model(inputs, keras.layers.BatchNormalization()(hidden))


def about_to_raise(x):
    if RANK == 1:
        about_to_fail()
        raise ValueError("the flux capacitor is empty")
    return x


class Samples:
    """Samples made one by one, each in some time; on rank 1 one of them may raise."""

    def __init__(self, arrays, seconds=0.0, raises_after=None):
        self.arrays, self.seconds, self.raises_after, self.reads = arrays, seconds, raises_after, 0

    def __len__(self):
        return len(self.arrays["inputs"])

    def __getitem__(self, index):
        time.sleep(self.seconds)
        self.reads += 1
        if RANK == 1 and self.reads == self.raises_after:
            about_to_fail()
            raise ValueError("the flux capacitor is empty")
        return {name: array[index] for name, array in self.arrays.items()}


class DataRaises(Sound):
    """On rank 1 the data raises after some batches."""

    def train_data(self):
        return Samples(super().train_data(), raises_after=60)


class Slow(Sound):
    """Takes some 50 ms a step, and notes its process, so that a test can step in."""

    defaults = Sound.defaults | {"steps": 100_000}

    def train_data(self):
        Path(f"pid-{RANK}").write_text(str(os.getpid()))
        return Samples(super().train_data(), seconds=0.025)


class ForEver(Samples):
    """Samples of which one, on rank 1, never comes, or ends the process with the code of success."""

    ends, rank = False, 1

    def __getitem__(self, index):
        if self.rank == RANK and self.reads >= 120:
            about_to_fail()
            if self.ends:
                os._exit(0)
            time.sleep(600)
        return super().__getitem__(index)


class DataWaits(Slow):
    """On rank 1 a sample never comes."""

    def train_data(self):
        return ForEver(super().train_data().arrays, seconds=0.025)


class Leaves(Slow):
    """On rank 1 the process ends with the code of success in the middle of training."""

    def train_data(self):
        data = ForEver(super().train_data().arrays, seconds=0.025)
        data.ends = True
        return data


class LeavesAlone(Leaves):
    """The only worker does so."""

    def train_data(self):
        data = super().train_data()
        data.rank = 0
        return data


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

    def tf_loss(self, model, batch):
        import tensorflow as tf

        outputs = model(batch["inputs"]) * batch["scale"]
        return tf.sqrt(tf.reduce_sum(outputs**2, 1)), {}


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


class Empty(Sound):
    """No samples."""

    samples = 0


class NotesItsStart(Sound):
    """Notes when the data is opened, shortly before something fails."""

    def train_data(self):
        about_to_fail()
        return super().train_data()


class BrokenModel(NotesItsStart):
    """On rank 1 the model cannot be built."""

    def torch_model(self):
        if RANK == 1:
            raise ValueError("no weights to start from")
        return super().torch_model()


if __name__ == "__main__":
    import hvdtrain

    hvdtrain.train(LossRaises, framework="torch", run_dir="run")
