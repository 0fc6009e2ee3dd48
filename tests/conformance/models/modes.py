"""Models that do more than set a flag in ``train()`` and ``eval()``, which every trainer calls."""

from conformance.zoo import Judge, Model


class EvaluationModeOnce(Model):
    """Batch norm in evaluation mode in ``torch_model()``, which the first ``train()`` undoes."""

    judge = Judge(workers=(1,), noted=("puts 0 (BatchNorm1d) into training mode", "override train()"))

    def torch_model(self):
        import torch

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

        return torch.nn.Sequential(Low())


class MergedWithAverages(MergedInEvaluation):
    """The same with a moving average of the weights so short that it is the weights."""

    judge = Judge(options=("--ema-decay", "1e-9"))


class ReplacedInEvaluation(Model):
    """``eval()`` puts another parameter in the place of the weight, and turns it."""

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

        return torch.nn.Sequential(Turned())
