"""Losses with parameters: those of a module are trained and saved, others are refused by name."""

from typing import Any

from conformance.zoo import Judge, Model, tf_classifier


def torch_classifier() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))


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

    def torch_model(self):
        return torch_classifier()


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

    def torch_model(self):
        return torch_classifier()

    tf_model = tf_classifier


class FrozenTeacher(Model):
    """A teacher of the task's own that is frozen is no parameter."""

    judge = Judge(workers=(2,))

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy

        teacher = torch_classifier().requires_grad_(False)
        targets = teacher(batch["inputs"]).softmax(1)
        return cross_entropy(model(batch["inputs"]), targets, reduction="none"), {}

    def torch_model(self):
        import torch

        torch.manual_seed(3)
        return torch.nn.Linear(4, 3)
