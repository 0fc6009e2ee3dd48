"""Losses of labels and numbers, and of a teacher that the model moves."""

import numpy as np
from conformance.zoo import SAMPLES, Judge, Model, X, Y, module

RANDOM = np.random.RandomState(4)
LABELS = (RANDOM.rand(SAMPLES, 3) > 0.6).astype(np.float32)
NUMBERS = RANDOM.randn(SAMPLES, 1).astype(np.float32)


class Objective(Model):
    """A loss on a small network; a class says which targets it has, and how it is called."""

    targets: object = Y
    outputs = 3

    @classmethod
    def frameworks(cls):
        if cls is Objective:
            return ()
        return tuple(f for f in ("torch", "tf") if cls.judge.frameworks == () or f in cls.judge.frameworks)

    def data(self, rows):
        return {"inputs": X[rows], "targets": self.targets[rows], "row": np.arange(SAMPLES)[rows]}

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, self.outputs))

    def tf_model(self):
        import keras

        layers = keras.layers.Dense(8, "tanh"), keras.layers.Dense(self.outputs)
        return keras.Sequential([keras.Input((4,)), *layers])


class Labels(Objective):
    """Several labels of a sample."""

    loss = "binary_cross_entropy"
    targets = LABELS


class Distances(Objective):
    """Absolute errors of one number, with targets (samples, 1)."""

    loss = "mae"
    targets = NUMBERS
    outputs = 1


class MeanTeacher(Objective):
    """A teacher that is the moving average of the student, which the model moves in its forward pass."""

    judge = Judge(frameworks=("torch",))

    def torch_model(self):
        import copy

        import torch

        def forward(self, x):
            if self.training:
                with torch.no_grad():
                    for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                        slow.lerp_(fast, 0.3)
            return self.student(x), self.teacher(x)

        student = super().torch_model()
        return module(forward, student=student, teacher=copy.deepcopy(student).requires_grad_(False))

    def loss(self, outputs, batch):
        from torch.nn.functional import cross_entropy

        student, teacher = outputs
        entropy = cross_entropy(student, batch["targets"], reduction="none")
        return entropy + (student - teacher).pow(2).mean(-1)
