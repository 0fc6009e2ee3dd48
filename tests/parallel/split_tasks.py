"""Tasks whose models do what is easily lost if they are split into stages."""

import itertools

from stages_tasks import Mlp, Plain

import hvdtrain


def _dense(*sizes):
    from torch import nn

    return [nn.Linear(one, other) for one, other in itertools.pairwise(sizes)]


class RootIsTraining(Mlp):
    """Blocks that ask the whole model, or a module without parameters, whether it is in training."""

    def torch_model(self):
        from torch import nn

        class Twice(nn.Module):
            def forward(self, x):
                return x * 2 if self.training else x

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden, self.logits = _dense(64, 32, 10)
                self.twice = Twice()

            def first(self, x):
                x = self.hidden(x.flatten(1)).tanh()
                return x * 3 if self.training else x

            def second(self, x):
                return self.twice(self.logits(x))

            def forward(self, x):
                return self.second(self.first(x))

        return Model()

    def torch_blocks(self, model):
        return [hvdtrain.Block(model.first, model.hidden), hvdtrain.Block(model.second, model.logits)]


class InPlace(Plain):
    """Modules that change what they are given in place."""

    def torch_model(self):
        from torch import nn

        class Shift(nn.Module):
            def forward(self, x):
                return x.add_(0.5)

        modules = [Shift(), nn.Flatten(), *_dense(64, 32), nn.SiLU(inplace=True), *_dense(32, 32)]
        return nn.Sequential(*modules, nn.ReLU(inplace=True), *_dense(32, 10))


class IntegersInPlace(Mlp):
    """A block that changes whole numbers in place which the block before has given it."""

    def torch_model(self):
        import torch
        from torch import nn

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.hidden, self.middle, self.logits = _dense(64, 32, 32, 10)

            def first(self, x):
                return self.hidden(x.flatten(1)).tanh(), torch.zeros(32, dtype=torch.int64)

            def second(self, value):
                x, count = value
                count += 1
                return self.middle(x * count).tanh(), count

            def third(self, value):
                return self.logits(value[0] * value[1])

            def forward(self, x):
                return self.third(self.second(self.first(x)))

        return Model()

    def torch_blocks(self, model):
        blocks = (model.first, model.hidden), (model.second, model.middle), (model.third, model.logits)
        return [hvdtrain.Block(*block) for block in blocks]


class CountsAnew(Plain):
    """Statistics that move with each forward pass, in new tensors, and on which its outputs depend."""

    def torch_model(self):
        import torch
        from torch import nn

        class Count(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(1))

            def forward(self, x):
                x = x * (1 + self.count / 20)
                if self.training:
                    self.count = self.count + 1
                return x

        layers = (Count(), nn.Linear(64, 32), nn.Tanh(), Count(), nn.Linear(32, 32), nn.Tanh(), Count())
        return nn.Sequential(nn.Flatten(), *layers, nn.Linear(32, 10))


class OwnForward(Plain):
    """A sequential model whose own forward pass does more than to call its modules."""

    def torch_model(self):
        from torch import nn

        class Model(nn.Sequential):
            def forward(self, x):
                return super().forward(x) * 2

        return Model(nn.Flatten(), *_dense(64, 32), nn.Tanh(), *_dense(32, 10))


class RegularizedAtTheEnd(Plain):
    """A regularizer in the last stage alone, whose error rank 0 does not have."""

    def tf_model(self):
        import keras

        last = keras.layers.Dense(10, kernel_regularizer="l2")
        layers = [keras.layers.Flatten(), keras.layers.Dense(32, activation="tanh"), last]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])


class DropsOut(Plain):
    """A loss that is proportional to the first kernel, with dropout in the first stage."""

    def torch_model(self):
        from torch import nn

        first, last = nn.Linear(64, 32, bias=False), nn.Linear(32, 4, bias=False)
        return nn.Sequential(nn.Flatten(), first, nn.Dropout(0.5), last)

    metrics = {}  # noqa: RUF012

    @staticmethod
    def loss(outputs, batch):
        return outputs.mean(-1) if hasattr(outputs, "mean") else sum(outputs[:, i] for i in range(4)) / 4

    def tf_model(self):
        import keras

        dense = [keras.layers.Dense(size, use_bias=False) for size in (32, 4)]
        layers = [keras.layers.Flatten(), dense[0], keras.layers.Dropout(0.5), dense[1]]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])


class TrainsOtherwise(DropsOut):
    """Blocks that leave the dropout out, which the model has in training alone."""

    def torch_blocks(self, model):
        return [model[0], model[1], model[3]]

    def tf_blocks(self, model):
        return [layer for layer in model.layers if not layer.name.startswith("dropout")]
