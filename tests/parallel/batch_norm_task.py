"""A small net with batch norm, the same in both frameworks, over images of random numbers."""

import numpy as np

SIDE, CHANNELS, CLASSES = 6, 4, 3


class Normed:
    """Convolution, batch norm, a smooth activation, batch norm of vectors, a linear layer."""

    loss = "cross_entropy"
    metrics = {"accuracy": "accuracy"}  # noqa: RUF012
    defaults = {  # noqa: RUF012
        "learning_rate": 0.1,
        "steps": 40,
        "log_every": 1,
        "eval_every": None,
        "initial_parameters": "portable",
    }

    def __init__(self, samples=97):
        random = np.random.RandomState(5)
        # channels whose mean is far from 0, where careless variances lose their digits
        inputs = random.randn(samples, SIDE, SIDE, 1) * random.rand(samples, 1, 1, 1) + 3
        self.data = inputs.astype("float32"), random.randint(0, CLASSES, samples)

    def train_data(self):
        return self.data

    def eval_data(self):
        inputs, targets = self.data
        return {"inputs": inputs[:30], "targets": targets[:30]}

    def torch_model(self):
        from torch import nn
        from torch.nn import functional as F

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(1, CHANNELS, 3)
                self.norm = nn.BatchNorm2d(CHANNELS, eps=1e-3)
                self.flat_norm = nn.BatchNorm1d(CHANNELS, eps=1e-3)
                self.dense = nn.Linear(CHANNELS, CLASSES)

            def forward(self, x):
                x = F.silu(self.norm(self.conv(x.permute(0, 3, 1, 2))))
                return self.dense(self.flat_norm(x.square().mean((2, 3))))

        return Model()

    def tf_model(self):
        import keras
        from keras import layers, ops

        inputs = keras.Input((SIDE, SIDE, 1))
        x = layers.Conv2D(CHANNELS, 3, name="conv")(inputs)
        x = layers.BatchNormalization(momentum=0.9, name="norm")(x)
        x = ops.mean(ops.square(ops.silu(x)), (1, 2))
        x = layers.BatchNormalization(momentum=0.9, name="flat_norm")(x)
        return keras.Model(inputs, layers.Dense(CLASSES, name="dense")(x))
