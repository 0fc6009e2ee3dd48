"""Models that do more than set a flag in ``train()`` and ``eval()``, which every trainer calls."""

from conformance.zoo import Judge, Model


class FrozenBatchNorm(Model):
    """Batch norm kept in evaluation mode by an overridden ``train()``; frozen in Keras."""

    def torch_model(self):
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.head = torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3)
                self.norm.requires_grad_(False)

            def train(self, mode=True):
                super().train(mode)
                self.norm.eval()
                return self

            def forward(self, x):
                return self.head(self.norm(x))

        torch.manual_seed(0)
        return Net()

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        norm = keras.layers.BatchNormalization(trainable=False)
        return keras.Sequential([keras.Input((4,)), norm, keras.layers.Dense(3)])


class EvaluationModeOnce(Model):
    """Batch norm in evaluation mode in ``torch_model()``, which the first ``train()`` undoes."""

    judge = Judge(workers=(1,), noted=("puts 0 (BatchNorm1d) into training mode", "override train()"))

    def torch_model(self):
        import torch

        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
        model[0].eval()
        return model


class MergedInEvaluation(Model):
    """LoRA: ``eval()`` adds the product of two factors to the weight, ``train()`` takes it off again."""

    def torch_model(self):
        import torch

        class Low(torch.nn.Linear):
            def __init__(self):
                super().__init__(4, 3)
                self.weight.requires_grad_(False)
                self.a, self.b = torch.nn.Parameter(torch.randn(2, 4)), torch.nn.Parameter(torch.zeros(3, 2))
                self.is_merged = False

            def train(self, mode=True):
                super().train(mode)
                if mode is self.is_merged:
                    self.weight.data += (self.b @ self.a) * (-1 if mode else 1)
                    self.is_merged = not mode
                return self

            def forward(self, x):
                return super().forward(x) + (0 if self.is_merged else x @ self.a.T @ self.b.T)

        torch.manual_seed(0)
        return torch.nn.Sequential(Low())


class MergedWithAverages(MergedInEvaluation):
    """The same with a moving average of the weights so short that it is the weights."""

    judge = Judge(options=("--ema-decay", "1e-9"))


class ReplacedInEvaluation(Model):
    """``eval()`` puts another parameter in the place of the weight, and turns it."""

    judge = Judge(workers=(1, 2))

    def torch_model(self):
        import torch

        class Turned(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.weight, self.own = torch.nn.Parameter(torch.randn(4, 3)), None

            def train(self, mode=True):
                super().train(mode)
                if mode and self.own is not None:
                    self.weight, self.own = self.own[0], None
                elif not mode and self.own is None:
                    self.own = [self.weight]
                    self.weight = torch.nn.Parameter(self.weight.detach().T)
                return self

            def forward(self, x):
                return x @ (self.weight if self.own is None else self.weight.T)

        torch.manual_seed(0)
        return torch.nn.Sequential(Turned())
