"""What a forward pass may do: branches, functions with own gradients, checkpoints, Fourier transforms."""

from conformance.zoo import DECAYED, Judge, Model, module


def torch_of(forward, *layers):
    """Return a module with these linear layers."""
    from torch import nn

    return module(forward, layers=nn.ModuleList(nn.Linear(*sizes) for sizes in layers))


class ReentrantCheckpoint(Model):
    """The same by the older way, which runs a backward pass inside of the backward pass."""

    def torch_model(self):
        from torch.utils.checkpoint import checkpoint

        def forward(self, x):
            x = self.layers[0](x).tanh()
            x = checkpoint(lambda value: self.layers[1](value).tanh(), x, use_reentrant=True)
            return self.layers[2](x)

        return torch_of(forward, (4, 8), (8, 8), (8, 3))


class GradientReversal(Model):
    """Functions with gradients of their own: reversed, and passed straight through a rounding."""

    def torch_model(self):
        import torch

        class Reversed(torch.autograd.Function):
            @staticmethod
            def forward(context, x):
                return x.view_as(x)

            @staticmethod
            def backward(context, gradient):
                return -0.5 * gradient

        def forward(self, x):
            hidden = self.layers[0](x)
            rounded = hidden + (hidden.round() - hidden).detach()
            return self.layers[1](rounded) + self.layers[2](Reversed.apply(hidden))

        return torch_of(forward, (4, 6), (6, 3), (6, 3))


class ByTheData(Model):
    """A branch that the values of a batch decide, sample by sample, in Python."""

    def torch_model(self):
        import torch

        def forward(self, x):
            return torch.stack([self.layers[int(row[0] > 0)](row) for row in x])

        return torch_of(forward, (4, 3), (4, 3))


class Clamped(Model):
    """Weights that the forward pass bounds in place, as in a Wasserstein critic."""

    def torch_model(self):
        import torch

        def forward(self, x):
            with torch.no_grad():
                self.layers[0].weight.clamp_(-0.3, 0.3)
            return self.layers[0](x)

        return torch_of(forward, (4, 3))


class ClampedData(Model):
    """The same by ``.data``, which no version counter sees."""

    def torch_model(self):
        def forward(self, x):
            self.layers[0].weight.data.clamp_(-0.3, 0.3)
            return self.layers[0](x)

        return torch_of(forward, (4, 3))


class GradientHooks(Model):
    """Gradients that hooks of a parameter and of an activation change: linear ones, so that parts add up."""

    def torch_model(self):
        def forward(self, x):
            hidden = self.layers[0](x)
            if hidden.requires_grad:
                hidden.register_hook(lambda gradient: 0.5 * gradient)
            return self.layers[1](hidden)

        model = torch_of(forward, (4, 6), (6, 3))
        model.layers[1].weight.register_hook(lambda gradient: 2 * gradient)
        return model


class ClippedByHooks(GradientHooks):
    """Gradients that a hook clips: of a worker's part, and not of the sum."""

    judge = Judge(workers=(2,), noted=("layers.1.weight: hooks of the model are given each",), rtol=1e-2)

    def torch_model(self):
        model = super().torch_model()
        model.layers[1].weight.register_hook(lambda gradient: gradient.clamp(-0.02, 0.02))
        return model


class Compiled(Model):
    """A model with a part that torch.compile would compile, with eager code."""

    def torch_model(self):
        import torch
        from torch import nn

        body = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), backend="eager")
        return nn.Sequential(body, nn.Linear(8, 3))


class Momentum(Model):
    """A model in a wrapper of another attribute's name, trained with momentum and weight decay."""

    defaults = DECAYED

    def torch_model(self):
        import torch

        model = torch_of(lambda self, x: self.layers[1](self.layers[0](x).relu()), (4, 8), (8, 3))
        return torch.nn.DataParallel(model, device_ids=[])
