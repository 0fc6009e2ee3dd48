"""Sparse gradients of embeddings, and a model that hvdtrain refuses before the first step."""

from conformance.zoo import RANDOM, SAMPLES, Judge, Model, Y

TOKENS = RANDOM.randint(0, 10, (SAMPLES, 5))


class Tables(Model):
    """A sparse table that is used and one that is not, with hvdtrain's SGD."""

    judge = Judge(("torch",))

    def data(self, rows):
        return TOKENS[rows], Y[rows]

    def torch_model(self):
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.used, self.unused = (nn.EmbeddingBag(10, 8, sparse=True, mode="sum") for _ in range(2))
                self.head = nn.Linear(8, 3)

            def forward(self, x):
                return self.head(self.used(x))

        return Net()


class Scripted(Model):
    """A module of TorchScript."""

    judge = Judge(("torch",), (1, 2), ("a module of torch.jit.script", "Give the module itself"))

    def torch_model(self):
        import torch

        return torch.jit.script(torch.nn.Linear(4, 3))
