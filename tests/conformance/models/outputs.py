"""Models with several inputs and outputs, in mappings, tuples and classes."""

import dataclasses

import numpy as np
from conformance.zoo import SAMPLES, Model, X, Y, module

RANDOM = np.random.RandomState(5)
VALUES = RANDOM.randn(SAMPLES).astype(np.float32)


@dataclasses.dataclass
class Prediction:
    """What a model returns, as some libraries define it."""

    logits: object
    hidden: object = None


def heads(made):
    """Return a module with a body and two heads; ``made`` makes an output of the module and three tensors."""
    from torch import nn

    def forward(self, x):
        hidden = self.body(x).tanh()
        return made(self, self.label(hidden), self.value(hidden), hidden)

    return module(forward, body=nn.Linear(4, 8), label=nn.Linear(8, 3), value=nn.Linear(8, 1))


class ADataClass(Model):
    """An output with logits, as those of Hugging Face."""

    def plain_outputs(self, model, inputs):
        return model(inputs).logits

    def torch_model(self):
        return heads(lambda self, label, value, hidden: Prediction(label, hidden))


class ANamedTuple(Model):
    """Two losses of a named tuple, in a function of the outputs."""

    def data(self, rows):
        return {"inputs": X[rows], "targets": Y[rows], "value": VALUES[rows, None]}

    def torch_model(self):
        import collections

        kind = collections.namedtuple("Output", ("label", "value"))
        return heads(lambda self, label, value, hidden: kind(label, value))

    def loss(self, outputs, batch):
        from torch.nn.functional import cross_entropy, mse_loss

        values = mse_loss(outputs.value, batch["value"], reduction="none")[:, 0]
        return cross_entropy(outputs.label, batch["targets"], reduction="none") + 0.1 * values


class ADict(ANamedTuple):
    """The same of mappings, in Keras by the names of the outputs."""

    def torch_model(self):
        return heads(lambda self, label, value, hidden: {"label": label, "value": value})

    def tf_model(self):
        import keras

        inputs = keras.Input((4,))
        hidden = keras.layers.Dense(8, "tanh")(inputs)
        outputs = {"label": keras.layers.Dense(3)(hidden), "value": keras.layers.Dense(1)(hidden)}
        return keras.Model(inputs, outputs)

    def loss(self, outputs, batch):
        try:
            from torch.nn import functional

            losses = functional.cross_entropy(outputs["label"], batch["targets"], reduction="none")
        except (ImportError, TypeError):
            import keras

            losses = keras.losses.sparse_categorical_crossentropy(
                batch["targets"], outputs["label"], from_logits=True
            )
        return losses + 0.1 * (outputs["value"] - batch["value"])[:, 0] ** 2


class AuxiliaryInTraining(Model):
    """A second head in training alone, as in GoogLeNet: outputs of another form in evaluation."""

    def torch_model(self):
        return heads(
            lambda self, label, value, hidden: (
                (label, value.expand(-1, 3) * hidden[:, :3]) if self.training else label
            )
        )

    def loss(self, outputs, batch):
        from torch.nn.functional import cross_entropy

        main, *others = outputs if isinstance(outputs, tuple) else (outputs,)
        losses = cross_entropy(main, batch["targets"], reduction="none")
        return losses + sum(
            0.4 * cross_entropy(other, batch["targets"], reduction="none") for other in others
        )

    def tf_model(self):
        import keras

        class Auxiliary(keras.Model):
            def __init__(self):
                super().__init__()
                self.body, self.main = keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)
                self.extra = keras.layers.Dense(3)

            def call(self, inputs, training=None):
                hidden = self.body(inputs)
                return (self.main(hidden), self.extra(hidden)) if training else self.main(hidden)

        model = Auxiliary()
        model(keras.ops.zeros((1, 4)), training=True)
        return model

    def tf_loss(self, model, batch):
        import keras

        outputs = model(batch["inputs"])
        main, *others = outputs if isinstance(outputs, (tuple, list)) else (outputs,)
        entropy = keras.losses.sparse_categorical_crossentropy
        losses = entropy(batch["targets"], main, from_logits=True)
        for other in others:
            losses += 0.4 * entropy(batch["targets"], other, from_logits=True)
        return losses, {}


class LossesInTraining(Model):
    """A model that is given targets and returns its losses in training alone, as in detection."""

    def torch_model(self):
        from torch import nn
        from torch.nn.functional import cross_entropy

        def forward(self, x, targets=None):
            hidden = self.body(x).tanh()
            logits = self.head(hidden)
            if not self.training:
                return logits
            return {"classes": cross_entropy(logits, targets), "size": 0.01 * hidden.pow(2).mean()}

        return module(forward, body=nn.Linear(4, 8), head=nn.Linear(8, 3))

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy

        import hvdtrain

        inputs, targets = batch["inputs"], batch["targets"]
        loss = (
            sum(model(inputs, targets).values()) if model.training else cross_entropy(model(inputs), targets)
        )
        return hvdtrain.Weighted(loss, len(targets)), {}


class SeveralInputs(Model):
    """Numbers and a category by name, one of which may be left out; an option with a default."""

    def data(self, rows):
        return {"inputs": {"numbers": X[rows], "kind": (Y[rows] + 1) % 3}, "targets": Y[rows]}

    def plain_outputs(self, model, inputs):
        return model(**inputs)

    def torch_model(self):
        import torch
        from torch import nn

        def forward(self, numbers, kind=None, scale=1.0):
            return scale * self.head(torch.cat([numbers, self.kinds(kind)], 1))

        return module(forward, kinds=nn.Embedding(3, 2), head=nn.Linear(6, 3))

    def tf_model(self):
        import keras

        numbers, kind = keras.Input((4,), name="numbers"), keras.Input((), dtype="int32", name="kind")
        encoded = keras.layers.CategoryEncoding(3, output_mode="one_hot")(kind)
        joined = keras.layers.Concatenate()([keras.layers.Dense(6, "relu")(numbers), encoded])
        return keras.Model({"numbers": numbers, "kind": kind}, keras.layers.Dense(3)(joined))


class Siamese(Model):
    """Two inputs through one network; the distance of the two is what is learned."""

    loss = "binary_cross_entropy"

    def data(self, rows):
        return {
            "inputs": (X[rows], X[::-1][rows].copy()),
            "targets": (Y[rows] > 0).astype(np.float32)[:, None],
        }

    def plain_outputs(self, model, inputs):
        return model(*inputs)

    def torch_model(self):
        from torch import nn

        def forward(self, first, second):
            return self.head((self.body(first) - self.body(second)).abs())

        return module(forward, body=nn.Sequential(nn.Linear(4, 6), nn.Tanh()), head=nn.Linear(6, 1))

    def tf_model(self):
        import keras

        first, second = keras.Input((4,)), keras.Input((4,))
        body = keras.Sequential([keras.layers.Dense(6, "tanh"), keras.layers.Dense(4)])
        return keras.Model([first, second], keras.layers.Dense(1)(keras.ops.abs(body(first) - body(second))))


class Nested(Model):
    """A model of models, one of which is frozen, and one that is called for its inner layer."""

    def tf_model(self):
        import keras

        layers = keras.layers
        inputs = keras.Input((4,))
        backbone = keras.Model(inputs, layers.Dense(6, "tanh", name="features")(layers.Dense(5)(inputs)))
        backbone.trainable = False
        whole = keras.Sequential([layers.Dense(6, "relu"), keras.Sequential([layers.Dense(4)])])
        features = keras.Model(backbone.inputs, backbone.get_layer("features").output)
        outputs = layers.Concatenate()([whole(features(inputs)), backbone(inputs)])
        return keras.Model(inputs, layers.Dense(3)(outputs))


class ActivityTerms(Model):
    """Terms of activations, also of the author's own block: padding does not count in their means."""

    def tf_model(self):
        import keras
        from keras import layers

        class Block(layers.Layer):
            def __init__(self):
                super().__init__()
                self.dense = layers.Dense(8, "tanh", activity_regularizer="l2")

            def call(self, inputs):
                hidden = self.dense(inputs)
                self.add_loss(0.1 * keras.ops.mean(hidden**2))
                return hidden

        terms = layers.ActivityRegularization(l1=0.01)
        return keras.Sequential([keras.Input((4,)), Block(), terms, layers.Dense(3)])
