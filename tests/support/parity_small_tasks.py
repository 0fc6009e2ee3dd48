"""Small tasks for ``parity``: large batches, several outputs, workers and frameworks that fail alone."""

import numpy as np


class Normed:
    """Normalizes batches of 64 images, after a convolution and dropout of whole channels."""

    loss, metrics = "cross_entropy", {}
    defaults = {"batch_size": 64, "learning_rate": 0.05, "seed": 3}  # noqa: RUF012

    def __init__(self, mistake=""):
        self.mistake = mistake

    def train_data(self):
        random = np.random.RandomState(0)
        return random.standard_normal((128, 8, 8, 3)).astype(np.float32), random.randint(0, 4, 128)

    def eval_data(self):
        return None

    def torch_model(self):
        from torch import nn
        from torch.nn import functional as F

        mistake = self.mistake

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv, self.dropped = nn.Conv2d(3, 8, 3), nn.Dropout2d(0.2)
                self.norm = nn.BatchNorm2d(8, eps=1e-3)
                self.logits = nn.Linear(8, 4)

            def forward(self, x):
                x = self.norm(self.dropped(self.conv(x.permute(0, 3, 1, 2)))).relu().mean((2, 3))
                return self.logits(F.dropout(x, 0.5, self.training) if mistake == "function" else x)

        return Model()

    def tf_model(self):
        import keras
        from keras import layers

        images = keras.Input((8, 8, 3))
        x = layers.SpatialDropout2D(0.2, name="dropped")(layers.Conv2D(8, 3, name="conv")(images))
        x = layers.ReLU()(layers.BatchNormalization(momentum=0.9, name="norm")(x))
        x = layers.GlobalAveragePooling2D()(x)
        return keras.Model(images, layers.Dense(4, name="logits")(x))


class Several:
    """Has two outputs in a dictionary, whose keys lie in another order, and a norm that computes in fp32."""

    defaults = {"steps": 1, "batch_size": 8, "learning_rate": 0.05, "seed": 3}  # noqa: RUF012

    def __init__(self, mistake=""):
        self.mistake = mistake

    def train_data(self):
        random = np.random.RandomState(0)
        return random.standard_normal((16, 4)).astype(np.float32), random.randint(0, 2, 16)

    def eval_data(self):
        return None

    def torch_loss(self, model, batch):
        return (model(batch["inputs"])["b"] ** 2).sum(1), {}

    def tf_loss(self, model, batch):
        import keras

        return keras.ops.sum(model(batch["inputs"])["b"] ** 2, axis=1), {}

    def torch_model(self):
        import torch
        from torch import nn

        class Norm(nn.Module):
            def __init__(self):
                super().__init__()
                self.scale = nn.Parameter(torch.ones(4))

            def forward(self, x):
                wide = x.float()
                wide = wide * torch.rsqrt((wide**2).mean(-1, keepdim=True) + 1e-6)
                return self.scale * wide.to(x.dtype)

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.norm, self.a, self.b = Norm(), nn.Linear(4, 3), nn.Linear(4, 2)

            def forward(self, x):
                x = self.norm(x)
                return {"b": self.b(x), "a": self.a(x)}

        return Model()

    def tf_model(self):
        import keras
        from keras import layers, ops

        factor = 2 if self.mistake == "second output" else 1

        class Norm(layers.Layer):
            def build(self, shape):
                self.scale = self.add_weight(shape=(4,), name="scale", initializer="ones")

            def call(self, x):
                wide = ops.cast(x, "float32")
                wide = wide * ops.rsqrt(ops.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
                return self.scale * ops.cast(wide, x.dtype)

        inputs = keras.Input((4,))
        x = Norm(name="norm")(inputs)
        outputs = {"a": factor * layers.Dense(3, name="a")(x), "b": layers.Dense(2, name="b")(x)}
        return keras.Model(inputs, outputs)
