"""Small tasks whose models are twins but for one mistake, planted in one of the frameworks."""

import numpy as np


class Planted:
    """A mistake, and random numbers with classes."""

    defaults = {"steps": 12, "batch_size": 8, "learning_rate": 0.05, "seed": 3}  # noqa: RUF012
    samples, shape, classes = 64, (8, 8, 3), 4

    def __init__(self, mistake=""):
        self.mistake = mistake

    def train_data(self):
        random = np.random.RandomState(0)
        inputs = random.standard_normal((self.samples, *self.shape)).astype(np.float32)
        return inputs, random.randint(0, self.classes, self.samples)

    def eval_data(self):
        return None


class Words(Planted):
    """Predicts the next token with one block of attention."""

    def train_data(self):
        tokens = np.random.RandomState(0).randint(0, 12, (64, 7))
        return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy

        outputs, targets = model(batch["inputs"]), batch["targets"].long()
        losses = cross_entropy(outputs.flatten(0, 1), targets.flatten(), reduction="none")
        return losses.view(targets.shape).mean(1), {}

    def tf_loss(self, model, batch):
        import keras

        outputs, targets = model(batch["inputs"]), batch["targets"]
        if self.mistake == "label shift":
            outputs, targets = outputs[:, :-1], targets[:, 1:]
        losses = keras.losses.sparse_categorical_crossentropy(targets, outputs, from_logits=True)
        return keras.ops.mean(losses, axis=1), {}

    def torch_model(self):
        from torch import nn
        from torch.nn import functional as F

        mistake = self.mistake

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.tokens = nn.Embedding(12, 16)
                self.norm = nn.LayerNorm(16, eps=1e-5)
                self.qkv = nn.Linear(16, 48)
                self.projection = nn.Linear(16, 16)
                self.wide = nn.Linear(16, 32)
                self.dropout = nn.Dropout(0.1)
                self.narrow = nn.Linear(32, 16)
                self.logits = nn.Linear(16, 12)

            def forward(self, tokens):
                x = 8 * self.tokens(tokens.long())
                q, k, v = self.qkv(self.norm(x)).unflatten(2, (3, 2, 8)).permute(2, 0, 3, 1, 4)
                y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                x = x + self.projection(y.transpose(1, 2).flatten(2))
                y = F.gelu(self.wide(x), approximate="tanh")
                y = F.dropout(y, 0.1) if mistake == "dropout left on" else self.dropout(y)
                return self.logits(x + self.narrow(y))

        return Model()

    def tf_model(self):
        import keras
        from keras import layers, ops

        def split(x):
            return ops.transpose(ops.reshape(x, (-1, 6, 3, 2, 8)), (2, 0, 3, 1, 4))

        tokens = keras.Input((6,), dtype="int32")
        x = 8 * layers.Embedding(12, 16, name="tokens")(tokens)
        y = layers.LayerNormalization(epsilon=1e-6 if self.mistake == "epsilon" else 1e-5, name="norm")(x)
        q, k, v = ops.unstack(split(layers.Dense(48, name="qkv")(y)), 3)
        scores = ops.matmul(q, ops.transpose(k, (0, 1, 3, 2))) * (8**-0.5)
        seen = np.tril(np.ones((6, 6)))
        scores = ops.where(seen > 0, scores, -1e9)
        y = ops.reshape(ops.transpose(ops.matmul(ops.softmax(scores), v), (0, 2, 1, 3)), (-1, 6, 16))
        x = x + layers.Dense(16, name="projection")(y)
        y = ops.gelu(layers.Dense(32, name="wide")(x), approximate=True)
        y = layers.Dropout(0.1, name="dropout")(y)
        return keras.Model(tokens, layers.Dense(12, name="logits")(x + layers.Dense(16, name="narrow")(y)))


class Pictures(Planted):
    """Classifies images with a strided convolution, batch norm and a layer of the user's own."""

    loss, metrics = "cross_entropy", {}

    def torch_model(self):
        import torch
        from torch import nn
        from torch.nn import functional as F

        mistake = self.mistake

        class Mix(nn.Module):
            def __init__(self):
                super().__init__()
                self.kernel = nn.Parameter(torch.zeros(8, 8))
                self.strength = nn.Parameter(torch.ones(8))

            def forward(self, x):
                return (x @ self.kernel) * self.strength

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 8, 3, stride=2)
                self.norm = nn.BatchNorm2d(8, eps=1e-3, momentum=0.9 if mistake == "momentum" else 0.1)
                self.hidden = nn.Linear(8, 8)
                self.mix = Mix()
                self.logits = nn.Linear(8, 4)

            def forward(self, x):
                x = x.permute(0, 3, 1, 2)
                x = F.pad(x, (0, 1, 0, 1))
                x = F.silu(self.norm(self.conv(x))).mean((2, 3))
                return self.logits(self.mix(torch.tanh(self.hidden(x))))

        return Model()

    def tf_model(self):
        import keras
        from keras import layers, ops

        mistake = self.mistake

        class Mix(layers.Layer):
            def build(self, shape):
                self.kernel = self.add_weight(shape=(8, 8), name="kernel")
                value = 0.5 if mistake == "initial value" else 1.0
                constant = keras.initializers.Constant(value)
                self.strength = self.add_weight(shape=(8,), name="strength", initializer=constant)

            def call(self, x):
                return ops.matmul(x, self.kernel) * self.strength

        images = keras.Input((8, 8, 3))
        x = layers.ZeroPadding2D(1)(images) if mistake == "padding" else images
        padding = "valid" if mistake == "padding" else "same"
        x = layers.Conv2D(8, 3, strides=2, padding=padding, name="conv")(x)
        x = ops.silu(layers.BatchNormalization(momentum=0.9, name="norm")(x))
        x = layers.GlobalAveragePooling2D()(x)
        x = layers.Dense(8, activation="tanh", name="hidden")(x)
        return keras.Model(images, layers.Dense(4, name="logits")(Mix(name="mix")(x)))


class Unlike(Words):
    """Its models have other names and shapes."""

    def tf_model(self):
        from keras import Input, Sequential, layers

        return Sequential(
            [Input((6,)), layers.Embedding(12, 16, name="words"), layers.Dense(13, name="logits")]
        )


class Normed(Planted):
    """Normalizes batches of 64 images, after a convolution and dropout of whole channels."""

    loss, metrics = "cross_entropy", {}
    defaults = {"batch_size": 64, "learning_rate": 0.05, "seed": 3}  # noqa: RUF012
    samples = 128

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


class Several(Planted):
    """Has two outputs in a dictionary, whose keys lie in another order, and a norm that computes in fp32."""

    defaults = {"steps": 1, "batch_size": 8, "learning_rate": 0.05, "seed": 3}  # noqa: RUF012
    samples, shape, classes = 16, (4,), 2

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
