"""What a forward pass may do: branches, functions with own gradients, checkpoints, Fourier transforms."""

from conformance.zoo import DECAYED, Judge, Model

BOTH = Judge(workers=(1, 2))


def torch_of(forward, *layers):
    """Return a module whose forward pass is a function of (module, inputs)."""
    import torch
    from torch import nn

    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in layers)

        def forward(self, x):
            return forward(self, x)

    torch.manual_seed(0)
    return Module()


class Checkpointed(Model):
    """Activations that the backward pass computes anew."""

    judge = BOTH

    def torch_model(self):
        from torch.utils.checkpoint import checkpoint

        def forward(self, x):
            for layer in self.layers[:-1]:
                x = checkpoint(lambda value, layer=layer: layer(value).tanh(), x, use_reentrant=False)
            return self.layers[-1](x)

        return torch_of(forward, (4, 8), (8, 8), (8, 3))


class ReentrantCheckpoint(Model):
    """The same by the older way, which runs a backward pass inside of the backward pass."""

    judge = BOTH

    def torch_model(self):
        from torch.utils.checkpoint import checkpoint

        def forward(self, x):
            x = self.layers[0](x).tanh()
            x = checkpoint(lambda value: self.layers[1](value).tanh(), x, use_reentrant=True)
            return self.layers[2](x)

        return torch_of(forward, (4, 8), (8, 8), (8, 3))


class GradientReversal(Model):
    """Functions with gradients of their own: reversed, and passed straight through a rounding."""

    judge = BOTH

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

    def tf_model(self):
        import keras
        import tensorflow as tf

        class Straight(keras.layers.Layer):
            def call(self, inputs):
                @tf.custom_gradient
                def rounded(x):
                    return tf.round(4 * x) / 4, lambda gradient: -0.5 * gradient

                return rounded(inputs)

        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(6), Straight(), keras.layers.Dense(3)])


class ByTheData(Model):
    """A branch that the values of a batch decide, sample by sample, in Python."""

    judge = BOTH

    def torch_model(self):
        import torch

        def forward(self, x):
            return torch.stack([self.layers[int(row[0] > 0)](row) for row in x])

        return torch_of(forward, (4, 3), (4, 3))

    def tf_model(self):
        import keras
        import tensorflow as tf

        class Branches(keras.Model):
            def __init__(self):
                super().__init__()
                self.first, self.second = keras.layers.Dense(3), keras.layers.Dense(3)

            def call(self, inputs):
                return tf.where(inputs[:, :1] > 0, self.first(inputs), self.second(inputs))

        keras.utils.set_random_seed(0)
        model = Branches()
        model(keras.ops.zeros((1, 4)))
        return model


class InnerGradient(Model):
    """A model that differentiates: it corrects its output by a gradient that it computes itself."""

    judge = BOTH

    def torch_model(self):
        import torch

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                energy = self.layers[0](x).tanh().pow(2).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return self.layers[1](force)

        return torch_of(forward, (4, 6), (4, 3))

    def tf_model(self):
        import keras
        import tensorflow as tf

        class Energy(keras.Model):
            def __init__(self):
                super().__init__()
                self.hidden, self.head = keras.layers.Dense(6, "tanh"), keras.layers.Dense(3)

            def call(self, inputs):
                with tf.GradientTape() as tape:
                    tape.watch(inputs)
                    energy = tf.reduce_sum(self.hidden(inputs) ** 2)
                return self.head(tape.gradient(energy, inputs))

        keras.utils.set_random_seed(0)
        model = Energy()
        model(tf.zeros((1, 4)))
        return model


class Clamped(Model):
    """Weights that the forward pass bounds in place, as in a Wasserstein critic."""

    judge = BOTH

    def torch_model(self):
        import torch

        def forward(self, x):
            with torch.no_grad():
                self.layers[0].weight.clamp_(-0.3, 0.3)
            return self.layers[0](x)

        return torch_of(forward, (4, 3))


class ClampedData(Model):
    """The same by ``.data``, which no version counter sees."""

    judge = BOTH

    def torch_model(self):
        def forward(self, x):
            self.layers[0].weight.data.clamp_(-0.3, 0.3)
            return self.layers[0](x)

        return torch_of(forward, (4, 3))


class GradientHooks(Model):
    """Gradients that hooks of a parameter and of an activation change: linear ones, so that parts add up."""

    judge = BOTH

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

    judge = BOTH

    def torch_model(self):
        import torch
        from torch import nn

        torch.manual_seed(0)
        body = torch.compile(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), backend="eager")
        return nn.Sequential(body, nn.Linear(8, 3))


class StochasticDepthOff(Model):
    """Blocks that training leaves out at random, with the probability 0; each batch calls all of them."""

    judge = BOTH

    def torch_model(self):
        import torch

        def forward(self, x):
            for layer in self.layers[:-1]:
                keep = torch.empty(len(x), 1).bernoulli_(1.0)
                x = x + layer(x).tanh() * keep if self.training else x + layer(x).tanh()
            return self.layers[-1](x)

        return torch_of(forward, (4, 4), (4, 4), (4, 3))

    def tf_model(self):
        import keras

        class Depth(keras.layers.Layer):
            def __init__(self):
                super().__init__()
                self.dense = keras.layers.Dense(4, "tanh")

            def call(self, inputs, training=None):
                keep = keras.random.uniform((keras.ops.shape(inputs)[0], 1)) >= 0 if training else True
                return inputs + self.dense(inputs) * keras.ops.cast(keep, "float32")

        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((4,)), Depth(), Depth(), keras.layers.Dense(3)])


class Momentum(Model):
    """A model in a wrapper of another attribute's name, trained with momentum and weight decay."""

    judge = BOTH
    defaults = DECAYED

    def torch_model(self):
        import torch

        model = torch_of(lambda self, x: self.layers[1](self.layers[0](x).relu()), (4, 8), (8, 3))
        return torch.nn.DataParallel(model, device_ids=[])
