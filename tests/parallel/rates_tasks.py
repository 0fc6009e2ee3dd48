"""Tasks with optimizers of their own, whose steps move every parameter by exactly the learning rate."""

from small_task import Small


class Lion(Small):
    """An optimizer as third parties write them: in PyTorch, its class requires the learning rate."""

    defaults = {"batch_size": 8, "log_every": 1, "initial_parameters": "portable"}  # noqa: RUF012
    bias_rate = 5e-4

    def torch_optimizer(self, parameters):
        import torch

        class Lion(torch.optim.Optimizer):
            def __init__(self, params, lr):
                super().__init__(params, {"lr": lr})

            @torch.no_grad()
            def step(self, closure=None):
                for group in self.param_groups:
                    for p in group["params"]:
                        p.sub_(group["lr"] * p.grad.sign())

        kernel, bias = parameters
        return Lion([{"params": [kernel], "lr": 5e-4}, {"params": [bias], "lr": self.bias_rate}], 0.7)

    def tf_optimizer(self):
        import keras

        return keras.optimizers.Lion(5e-4)


class Scheduled(Lion):
    """The task has a schedule of its own."""

    def learning_rate_factor(self, progress):
        return 1 / (1 + progress.epoch)


class Groups(Lion):
    """The bias learns ten times as fast as the kernel."""

    bias_rate = 5e-3
