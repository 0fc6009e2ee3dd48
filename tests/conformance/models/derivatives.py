"""Models and losses that compute derivatives, or keep tensors, in evaluation, too."""

import numpy as np
from conformance.zoo import RANDOM, SAMPLES, Judge, Model, X, module

POSITIONS = RANDOM.randn(SAMPLES, 3).astype(np.float32)


class Forces(Model):
    """Forces: the derivative of an energy with respect to the positions."""

    loss = "mse"

    def data(self, rows):
        return POSITIONS[rows], -2 * POSITIONS[rows]

    def torch_model(self):
        import torch

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.energy(x).sum()
                return -torch.autograd.grad(energy, x, create_graph=True)[0]

        return module(
            forward,
            energy=torch.nn.Sequential(torch.nn.Linear(3, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)),
        )

    def tf_model(self):
        import keras
        import tensorflow as tf

        class Net(keras.Model):
            def __init__(self):
                super().__init__()
                self.energy = keras.Sequential(
                    [keras.Input((3,)), keras.layers.Dense(16, "tanh"), keras.layers.Dense(1)]
                )

            def call(self, x):
                with tf.GradientTape() as tape:
                    tape.watch(x)
                    energy = tf.reduce_sum(self.energy(x))
                return -tape.gradient(energy, x)

        model = Net()
        model(np.zeros((1, 3), np.float32))
        return model


class ForcesWithoutGradient(Forces):
    """The same without ``enable_grad``: it fails in every evaluation."""

    judge = Judge(("torch",), (1, 2), ("the first batch of the evaluation data fails", "torch.enable_grad()"))

    def torch_model(self):
        import torch

        model = super().torch_model()
        energy = model.energy
        model.forward = lambda x: (
            -torch.autograd.grad(energy(x.requires_grad_()).sum(), x, create_graph=True)[0]
        )
        return model


class DerivativeInLoss(Model):
    """A physics-informed loss: the derivative of the network in the loss itself."""

    def torch_model(self):
        import torch

        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def torch_loss(self, model, batch):
        import torch

        with torch.enable_grad():
            x = batch["inputs"].clone().requires_grad_()
            slope = torch.autograd.grad(model(x).sum(), x, create_graph=True)[0]
            return (slope + x).square().mean(-1), {"slope": slope.abs().mean(-1)}


class KeptTensors(Model):
    """A table made in each evaluation and used in training after it."""

    def eval_data(self):
        return X[:4], np.arange(4) % 3

    def torch_model(self):
        import torch

        def forward(self, x):
            if not self.training:
                self.table = self.head.weight * 2
            out = self.head(x)
            return out if self.table is None else out + x @ self.table.detach().T * 0.0

        return module(forward, head=torch.nn.Linear(4, 3), table=None)
