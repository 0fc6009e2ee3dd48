"""Losses of classes, labels, numbers, counts, distributions and sequences, and those of teachers."""

import numpy as np
from conformance.zoo import EVALUATED, SAMPLES, Judge, Model, X, Y

RANDOM = np.random.RandomState(4)
BOTH = Judge(workers=(1, 2))
LABELS = (RANDOM.rand(SAMPLES, 3) > 0.6).astype(np.float32)
NUMBERS = RANDOM.randn(SAMPLES, 1).astype(np.float32)
WEIGHTS = RANDOM.rand(SAMPLES).astype(np.float32)


def torch_net(outputs=3):
    """Return a network of two layers."""
    import torch
    from torch import nn

    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs))


def keras_net(outputs=3):
    """Return the same of Keras."""
    import keras

    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(outputs)])


class Objective(Model):
    """A loss on a small network; a class says which targets it has, and how it is called."""

    judge = BOTH
    targets: object = Y
    outputs = 3

    @classmethod
    def frameworks(cls):
        if cls is Objective:
            return ()
        return tuple(f for f in ("torch", "tf") if cls.judge.frameworks == () or f in cls.judge.frameworks)

    def data(self, rows):
        return {"inputs": X[rows], "targets": self.targets[rows], "row": np.arange(SAMPLES)[rows]}

    def train_data(self):
        return self.data(slice(None))

    def eval_data(self):
        return self.data(slice(EVALUATED))

    def torch_model(self):
        return torch_net(self.outputs)

    def tf_model(self):
        return keras_net(self.outputs)


TORCH = Judge(frameworks=("torch",), workers=(1, 2))
KERAS = Judge(frameworks=("tf",), workers=(1, 2))


class Labels(Objective):
    """Several labels of a sample."""

    loss = "binary_cross_entropy"
    targets = LABELS


class Distances(Objective):
    """Absolute errors of one number, with targets (samples, 1)."""

    loss = "mae"
    targets = NUMBERS
    outputs = 1


class WeightsInData(Objective):
    """A weight for each sample, in a column of the data: the mean is by weights."""

    def data(self, rows):
        return {"inputs": X[rows], "targets": Y[rows], "weights": WEIGHTS[rows]}


class Smoothed(Objective):
    """Smoothed targets with weights of classes, and ignored labels: a mean by the weights of targets."""

    judge = TORCH

    def loss(self, outputs, batch):
        import torch
        from torch.nn.functional import cross_entropy

        import hvdtrain

        targets, weights = batch["targets"].clone(), torch.tensor([0.2, 0.5, 0.3])
        targets[batch["row"] % 7 == 0] = -100
        losses = cross_entropy(outputs, targets, weights, label_smoothing=0.1, reduction="none")
        weights = weights[targets.clamp(min=0)]
        return hvdtrain.Weighted(losses / weights, weights * (targets >= 0))


class FocalOfKeras(Objective):
    """The same by a loss of Keras, without its mean."""

    judge = KERAS
    targets = LABELS

    def loss(self, outputs, batch):
        import keras

        return keras.losses.binary_focal_crossentropy(batch["targets"], outputs, from_logits=True)


class Dice(Objective):
    """The overlap of a sample's labels, by sample."""

    targets = LABELS

    def loss(self, outputs, batch):
        targets = batch["targets"]
        if hasattr(outputs, "detach"):
            chances = outputs.sigmoid()
            return 1 - (2 * (chances * targets).sum(-1) + 1) / (chances.sum(-1) + targets.sum(-1) + 1)
        import tensorflow as tf

        chances = tf.sigmoid(outputs)
        both = tf.reduce_sum(chances * targets, -1)
        return 1 - (2 * both + 1) / (tf.reduce_sum(chances, -1) + tf.reduce_sum(targets, -1) + 1)


class Speech(Objective):
    """Characters of a sequence of frames without their places, by CTC."""

    judge = Judge(frameworks=("torch",))
    targets = np.stack([RANDOM.randint(1, 5, 3) for _ in range(SAMPLES)])
    outputs = 8 * 5

    def torch_loss(self, model, batch):
        import torch
        from torch.nn.functional import ctc_loss

        scores = model(batch["inputs"]).view(-1, 8, 5).log_softmax(-1).transpose(0, 1)
        lengths = 1 + batch["row"] % 3
        frames = torch.full_like(lengths, 8)
        losses = ctc_loss(scores, batch["targets"], frames, lengths, reduction="none")
        return losses / lengths, {}


class Distilled(Objective):
    """A student that learns the outputs of a frozen teacher with batch norm, a part of the model."""

    judge = Judge(frameworks=("torch",))

    def torch_model(self):
        import torch
        from torch import nn

        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.teacher = nn.Sequential(torch_net(5), nn.BatchNorm1d(5), nn.Linear(5, 3))
                self.teacher.requires_grad_(False)
                self.student = torch_net()

            def train(self, mode=True):
                super().train(mode)
                self.teacher.eval()
                return self

            def forward(self, x):
                with torch.no_grad():
                    wanted = self.teacher(x)
                return self.student(x), wanted

        return Pair()

    def loss(self, outputs, batch):
        from torch.nn.functional import cross_entropy, kl_div

        student, teacher = (output / 2 for output in outputs)
        apart = kl_div(student.log_softmax(-1), teacher.softmax(-1), reduction="none").sum(-1)
        return 0.5 * cross_entropy(2 * student, batch["targets"], reduction="none") + 2 * apart


class MeanTeacher(Objective):
    """A teacher that is the moving average of the student, which the model moves in its forward pass."""

    judge = Judge(frameworks=("torch",))

    def torch_model(self):
        import copy

        import torch
        from torch import nn

        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.student = torch_net()
                self.teacher = copy.deepcopy(self.student).requires_grad_(False)

            def forward(self, x):
                if self.training:
                    with torch.no_grad():
                        for slow, fast in zip(
                            self.teacher.parameters(), self.student.parameters(), strict=True
                        ):
                            slow.lerp_(fast, 0.3)
                return self.student(x), self.teacher(x)

        return Pair()

    def loss(self, outputs, batch):
        from torch.nn.functional import cross_entropy

        student, teacher = outputs
        entropy = cross_entropy(student, batch["targets"], reduction="none")
        return entropy + (student - teacher).pow(2).mean(-1)
