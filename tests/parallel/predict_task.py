"""Tasks whose outputs are predicted: data without targets, and outputs that are not by sample."""

import numpy as np
from small_task import Small

import hvdtrain

SAMPLES = 23  # no multiple of workers times samples


class Unlabelled(Small):
    """The task with data to predict, in an order of its own and without targets."""

    def predict_data(self):
        return {"inputs": self.data[0][:SAMPLES][::-1].copy()}


class Served(Small):
    """What is served are two arrays by sample and a number for the batch."""

    def torch_serve(self, model, batch):
        outputs = model(batch["inputs"])
        return {"pair": outputs, "grid": outputs[:, :, None] * outputs[:, None], "mean": outputs.mean()}

    def tf_serve(self, model, batch):
        import keras

        outputs = model(batch["inputs"])
        grid = outputs[:, :, None] * outputs[:, None]
        return {"pair": outputs, "grid": grid, "mean": keras.ops.mean(outputs)}


class Twice(Small):
    """A loss of the task's own, which calls the model, and no function for serving."""

    def torch_loss(self, model, batch):
        return ((model(batch["inputs"]) - batch["targets"]) ** 2).mean(1), {}


class Bare(Small):
    """A task without evaluation data."""

    def eval_data(self):
        return None


def expected(weights, task="Unlabelled"):
    """Return what the task predicts with a kernel and a bias."""
    kernel, bias = weights
    made = globals()[task]()
    inputs = made.predict_data()["inputs"] if task == "Unlabelled" else made.eval_data()["inputs"]
    return np.asarray(inputs @ kernel + bias)


def loaded(framework, checkpoint):
    """A case of a pool: return kernel and bias of the model that hvdtrain.load returns."""
    model = hvdtrain.load(checkpoint, f"{__file__}:Unlabelled", framework=framework)
    if framework == "tf":
        kernel, bias = model.get_weights()
    else:
        assert not model.training
        kernel, bias = model.weight.detach().numpy().T, model.bias.detach().numpy()
    return kernel.tolist(), bias.tolist()
