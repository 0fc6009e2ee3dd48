"""Tasks that ``prove`` must not let pass."""

from conformance.models.keras_masks import Regression
from conformance.zoo import Model, module


class Forgetful(Model):
    """Counts the batches of training in an attribute, and draws numbers in training alone."""

    def torch_model(self):
        import torch

        def forward(self, x):
            self.calls += self.training
            x = x + 0.1 * torch.rand_like(x) if self.training else x
            return self.linear(x) * (1 if self.calls < 3 else 2)

        return module(forward, linear=torch.nn.Linear(4, 3), calls=0)


class Batchwise(Model):
    """Draws numbers in training; weights are integers; once trained, a metric depends on the batch."""

    def torch_loss(self, model, batch):
        import torch
        from torch.nn.functional import cross_entropy

        import hvdtrain

        outputs = model(batch["inputs"])
        losses = cross_entropy(outputs, batch["targets"], reduction="none")
        weights = 1 + batch["targets"].to(torch.int64)
        spread = outputs.std() if not torch.equal(model.linear.bias, self.bias) else torch.tensor(1.0)
        return hvdtrain.Weighted(losses, weights), {"spread": spread.expand(len(outputs))}

    def torch_model(self):
        import torch

        def forward(self, x):
            return self.linear(x + 0.1 * torch.rand_like(x) if self.training else x)

        model = module(forward, linear=torch.nn.Linear(4, 3))
        self.bias = model.linear.bias.detach().clone()
        return model


class Stepping(Model):
    """Has a training step of its own, so that one worker is the judge."""

    def torch_step(self, model, batch, optimizers):
        from torch.nn.functional import cross_entropy

        losses = cross_entropy(model(batch["inputs"]), batch["targets"].long(), reduction="none")
        optimizers["main"].minimize(losses)
        return losses, {}

    def torch_model(self):
        import torch

        return torch.nn.Linear(4, 3)


class Unmasked(Regression):
    """Is right, but a mask does not reach the loss here; plain loops do not use what is changed."""

    def __init__(self):
        from hvdtrain.backends.objective import losses

        losses.mask_of = lambda outputs: None
