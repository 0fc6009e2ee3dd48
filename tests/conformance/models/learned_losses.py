"""Losses with parameters: those of a module are trained and saved, others are refused by name; teachers."""

from typing import Any

from conformance.zoo import Judge, Model, module, tf_classifier, torch_classifier


def proxies() -> Any:
    """Return the loss of metric learning with a learned proxy of each class, and a learned temperature."""
    import torch

    class Proxies(torch.nn.Module):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(1)
            self.proxies = torch.nn.Parameter(torch.randn(3, 3, generator=generator))
            self.temperature = torch.nn.Parameter(torch.tensor(0.5))

        def forward(self, outputs, batch):
            distances = torch.cdist(outputs, self.proxies) * self.temperature.exp()
            return torch.nn.functional.cross_entropy(-distances, batch["targets"], reduction="none")

    return Proxies()


class ProxyLoss(Model):
    """A Sequential, which calls all of its parts, and a loss that is a module."""

    judge = Judge(frameworks=("torch",))

    def __init__(self):
        self.loss = proxies()

    torch_model = torch_classifier


class ProxyLossWithAdamW(ProxyLoss):
    """The optimizer of the task's own is given the parameters of the loss, too."""

    judge = Judge(frameworks=("torch",), workers=(2,))

    def torch_optimizer(self, parameters):
        import torch

        return torch.optim.AdamW(parameters, 0.1)


class HeldByTheTask(Model):
    """Uncertainties of the task's own: nothing would train them."""

    judge = Judge(workers=(1, 2), refused=("gradient for self.log_vars", "no part of the model"))

    def __init__(self):
        self.log_vars = None

    def torch_loss(self, model, batch):
        import torch
        from torch.nn.functional import cross_entropy

        if self.log_vars is None:
            self.log_vars = torch.nn.Parameter(torch.zeros(3))
        logits = model(batch["inputs"]) * torch.exp(-self.log_vars)
        return cross_entropy(logits, batch["targets"], reduction="none") + self.log_vars.sum(), {}

    def tf_loss(self, model, batch):
        import tensorflow as tf

        if self.log_vars is None:
            self.log_vars = tf.Variable(tf.zeros(3))
        logits = model(batch["inputs"]) * tf.exp(-self.log_vars)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch["targets"], logits)
        return losses + tf.reduce_sum(self.log_vars), {}

    torch_model, tf_model = torch_classifier, tf_classifier


class MeanTeacher(Model):
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

        student = torch_classifier()
        return module(forward, student=student, teacher=copy.deepcopy(student).requires_grad_(False))

    def loss(self, outputs, batch):
        from torch.nn.functional import cross_entropy

        student, teacher = outputs
        entropy = cross_entropy(student, batch["targets"], reduction="none")
        return entropy + (student - teacher).pow(2).mean(-1)


class FrozenTeacher(Model):
    """A teacher of the task's own that is frozen is no parameter."""

    judge = Judge(workers=(2,))

    def torch_loss(self, model, batch):
        import torch
        from torch.nn.functional import cross_entropy

        torch.manual_seed(3)
        teacher = torch_classifier().requires_grad_(False)
        targets = teacher(batch["inputs"]).softmax(1)
        return cross_entropy(model(batch["inputs"]), targets, reduction="none"), {}

    def torch_model(self):
        import torch

        return torch.nn.Linear(4, 3)


def keras_proxies() -> Any:
    """Return a Keras loss with a learned proxy of each class, and a learned temperature."""
    import keras
    import numpy as np

    class Proxies(keras.losses.Loss):
        def __init__(self):
            super().__init__()
            self.proxies = keras.Variable(np.random.RandomState(1).randn(3, 3).astype(np.float32))
            self.temperature = keras.Variable(0.5, name="temperature")

        def call(self, y_true, y_pred):
            from keras import ops

            distances = ops.sum(ops.square(y_pred[:, None] - self.proxies), -1) * ops.exp(self.temperature)
            return ops.sparse_categorical_crossentropy(
                ops.cast(y_true, "int32"), -distances, from_logits=True
            )

    return Proxies()


def keras_uncertainty() -> Any:
    """Return a task's own loss that is a layer with learned scales of logits."""
    import keras

    class Uncertainty(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.log_vars = self.add_weight(shape=(3,), initializer="zeros")

        def call(self, model, batch):
            from keras import ops

            logits = model(batch["inputs"]) * ops.exp(-self.log_vars)
            losses = ops.sparse_categorical_crossentropy(batch["targets"], logits, from_logits=True)
            return losses + ops.sum(self.log_vars), {}

    return Uncertainty()


class KerasProxyLoss(Model):
    """A Sequential and a loss that is a Keras object with variables."""

    def __init__(self):
        self.loss = keras_proxies()

    tf_model = tf_classifier


class KerasLossLayer(Model):
    """A functional model and a loss of the task's own that is a layer."""

    judge = Judge(workers=(2,))

    def __init__(self):
        self.tf_loss = keras_uncertainty()

    def tf_model(self):
        import keras

        inputs = keras.Input((4,))
        return keras.Model(inputs, keras.layers.Dense(3)(inputs))
