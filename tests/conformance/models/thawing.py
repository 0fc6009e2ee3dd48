"""Parameters that a callback freezes or thaws during the run, as fine-tuning does."""

from collections.abc import Mapping

import numpy as np
from conformance.zoo import GRADIENT_DESCENT, Judge, Model, X, Y


class Changing:
    """Changes the model after each step as the plain loop does."""

    every_rank = True

    def __init__(self, task):
        self.task = task

    def on_start(self, context):
        self.model = context.model

    def on_step(self, step, metrics):
        self.task.after_step(self.model, step.step)


class Thaw(Model):
    """The body is thawed after the second step, with momentum; a resume begins there."""

    defaults: Mapping[str, object] = {**GRADIENT_DESCENT, "momentum": 0.9}
    judge = Judge(noted=("from step 3 on:", "trained"))
    frozen = True

    def torch_model(self):
        import torch

        body = torch.nn.Linear(4, 8).requires_grad_(not self.frozen)
        return torch.nn.Sequential(body, torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def tf_model(self):
        import keras

        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.layers[0].trainable = not self.frozen
        return model

    def after_step(self, model, step):
        if step == 2:
            self.change(model, True)

    def change(self, model, is_trained):
        if hasattr(model, "parameters"):
            model[0].requires_grad_(is_trained)
        else:
            model.layers[0].trainable = is_trained

    def callbacks(self):
        return [Changing(self)]


class Freeze(Thaw):
    """The body is frozen after the second step: neither momentum nor weight decay moves it any more."""

    judge = Judge(noted=("from step 3 on:", "frozen"), workers=(2,))
    frozen = False

    def after_step(self, model, step):
        if step == 2:
            self.change(model, False)


class Alternating(Thaw):
    """Frozen after the first step and thawed after the third, in PyTorch with weight decay."""

    defaults: Mapping[str, object] = {**Thaw.defaults, "weight_decay": 0.1}
    judge = Judge(("torch",), workers=(1, 2))
    frozen = False

    def after_step(self, model, step):
        if step in {1, 3}:
            self.change(model, step == 3)


class Adam(Thaw):
    """The task's own optimizer, of which each parameter has its own count of steps in PyTorch."""

    defaults: Mapping[str, object] = {**GRADIENT_DESCENT, "learning_rate": 0.05}
    judge = Judge(workers=(1, 2))

    def torch_optimizer(self, parameters):
        import torch

        return torch.optim.AdamW(parameters, 0.05, weight_decay=0.1)

    def tf_optimizer(self):
        import keras

        return keras.optimizers.RMSprop(0.05)


class Tables(Thaw):
    """A sparse table that is thawed, with an optimizer that takes sparse gradients alone."""

    defaults: Mapping[str, object] = {**GRADIENT_DESCENT, "learning_rate": 0.05}
    judge = Judge(("torch",), workers=(1, 2))

    def data(self, rows):
        return np.abs(X[rows] * 4).astype(np.int64) % 10, Y[rows]

    def torch_model(self):
        import torch

        class Net(torch.nn.ModuleList):
            def forward(self, x):
                return self[0](x) + self[1](9 - x)

        tables = [torch.nn.EmbeddingBag(10, 3, sparse=True, mode="sum") for _ in range(2)]
        tables[0].requires_grad_(False)
        return Net(tables)

    def torch_optimizer(self, parameters):
        import torch

        return torch.optim.SparseAdam(parameters, 0.05)


class Alone(Thaw):
    """A callback that rank 0 alone calls."""

    judge = Judge(workers=(2,), refused=("rank 0 (", "alone thaws model/", "every_rank = True"))

    def callbacks(self):
        changing = Changing(self)
        changing.every_rank = False
        return [changing]


class Sharded(Thaw):
    """A feature that cannot follow."""

    judge = Judge(
        ("torch",), (2,), ("--shard does not follow what is frozen",), options=("--shard", "optimizer")
    )


class Replaced(Thaw):
    """A layer that a callback replaces."""

    judge = Judge(("torch",), (1, 2), ("2 was replaced in the model during training",))

    def after_step(self, model, step):
        import torch

        if step == 1:
            model[2] = torch.nn.Linear(8, 3)


class OwnStep(Freeze):
    """A step of the task's own decides itself what it minimizes."""

    judge = Judge(("torch",), (2,), ("a training step of the task's own does not follow",))

    def torch_step(self, model, batch, optimizers):
        from torch.nn.functional import cross_entropy

        losses = cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
        optimizers["all"].minimize(losses)
        return losses, {}

    def torch_optimizers(self, model):
        import torch

        return {"all": torch.optim.SGD(model.parameters(), 0.1)}


class FrozenByTrain(Model):
    """A part that an overridden train() keeps frozen, in evaluation mode."""

    def torch_model(self):
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
                self.head = torch.nn.Linear(8, 3)

            def train(self, mode=True):
                super().train(mode)
                self.body.eval().requires_grad_(False)
                return self

            def forward(self, x):
                return self.head(self.body(x))

        return Net()


class NormFrozen(Thaw):
    """Batch norm, which in Keras has no parameters and is frozen after the second step, in a model within."""

    judge = Judge(workers=(1,))

    def tf_model(self):
        import keras

        norm = keras.layers.BatchNormalization(center=False, scale=False)
        inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(8), norm])
        return keras.Sequential([keras.Input((4,)), inner, keras.layers.Dense(3)])

    def torch_model(self):
        import torch

        body = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8))
        return torch.nn.Sequential(body, torch.nn.Linear(8, 3))

    def change(self, model, is_trained):
        if hasattr(model, "parameters"):
            model[0][0].bias.requires_grad_(not is_trained)
        else:
            model.layers[0].layers[1].trainable = not is_trained
