"""Tasks that ``prove`` must not let pass."""

from conformance.zoo import Model


class Forgetful(Model):
    """Counts the batches of training in an attribute, and draws numbers in training alone."""

    def torch_model(self):
        import torch

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.linear, self.calls = torch.nn.Linear(4, 3), 0

            def forward(self, x):
                self.calls += self.training
                x = x + 0.1 * torch.rand_like(x) if self.training else x
                return self.linear(x) * (1 if self.calls < 3 else 2)

        torch.manual_seed(0)
        return Net()
