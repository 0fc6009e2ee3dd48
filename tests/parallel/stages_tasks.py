"""Tasks whose models are split into stages."""

import numpy as np

import hvdtrain
from hvdtrain.errors import BadSampleError
from hvdtrain.models import bert, gpt, mlp, resnet
from hvdtrain.tasks.digits import Digits

BAD_SAMPLE = 17


class Plain(Digits):
    """The data alone: nothing says what the blocks of a model are."""

    torch_blocks = tf_blocks = property()  # so that there is none


class Mlp(Digits):
    """Six dense layers."""

    def torch_model(self):
        return mlp.torch_model((8, 8, 1), 10, (32,) * 5)

    def torch_blocks(self, model):
        return mlp.torch_blocks(model)

    def tf_model(self):
        return mlp.tf_model((8, 8, 1), 10, (32,) * 5)

    def tf_blocks(self, model):
        return mlp.tf_blocks(model)


class Spectral(Plain):
    """Dense layers of Keras whose kernels are divided by what their forward passes move."""

    def tf_model(self):
        import keras

        dense = [keras.layers.Dense(16, name=f"dense{number}") for number in range(3)]
        layers = [keras.layers.SpectralNormalization(layer, name=f"norm_of_{layer.name}") for layer in dense]
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])


class ResNet(Digits):
    """ResNet-18 with SiLU."""

    def torch_model(self):
        return resnet.torch_model((8, 8, 1), 10, activation="silu")

    def torch_blocks(self, model):
        return resnet.torch_blocks(model)


class Tokens(Digits):
    """The digits' pixels as 64 tokens of 17."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.dropout = dropout
        for part in (self._train, self._eval):
            part["inputs"] = np.rint(part["inputs"].reshape(-1, 64) * 6 + 4.9).astype(np.int32)


class Gpt(Tokens):
    """A GPT, whose first and last block share the tokens' embedding, predicts each next pixel."""

    class_axis = -1

    def __init__(self, dropout=0.0):
        super().__init__(dropout)
        for part in (self._train, self._eval):
            tokens = part["inputs"]
            part["inputs"], part["targets"] = tokens[:, :15], tokens[:, 1:16].astype(np.int64)

    def torch_model(self):
        return gpt.torch_model(17, 16, 3, 2, 16, self.dropout)

    def torch_blocks(self, model):
        return gpt.torch_blocks(model)

    def tf_model(self):
        return gpt.tf_model(17, 16, 3, 2, 16, self.dropout)

    def tf_blocks(self, model):
        return gpt.tf_blocks(model)


class Bert(Tokens):
    """A BERT, between whose blocks two tensors lead, of which one are booleans."""

    def torch_model(self):
        return bert.torch_model(17, 64, 2, 2, 16, classes=10, dropout=self.dropout)

    def torch_blocks(self, model):
        return bert.torch_blocks(model)


class NoParameters(Digits):
    """A model whose first block has no parameters, and between whose blocks dicts and tuples lead."""

    def tf_model(self):
        import keras

        layers = [
            keras.layers.Flatten(),
            keras.layers.Dense(32, name="dense"),
            keras.layers.Dense(10, name="logits"),
        ]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])

    def tf_blocks(self, model):
        flatten, dense, logits = model.layers

        def first(x):
            return {"flat": flatten(x), "scale": (2.0,)}

        def second(value):
            return dense(value["flat"]), value["scale"]

        return [
            hvdtrain.Block(first),
            hvdtrain.Block(second, dense),
            hvdtrain.Block(lambda v: logits(v[0]), logits),
        ]


class Lengths(Plain):
    """Batches whose samples have another length in each."""

    def collate(self, samples):
        size = 5 + int(samples[0]["targets"]) % 4
        return {
            "inputs": np.stack([sample["inputs"][:size] for sample in samples]),
            "targets": np.stack([sample["targets"] for sample in samples]),
        }

    def tf_model(self):
        import keras

        x = keras.Input((None, 8, 1))
        y = keras.layers.Dense(4)(x)
        y = keras.ops.mean(keras.layers.Reshape((-1, 32))(y), 1)
        return keras.Model(x, keras.layers.Dense(10)(y))

    def tf_blocks(self, model):
        import keras

        last = model.layers[-1]
        return [keras.Model(model.input, last.input), last]


class OneBlock(Plain):
    """A model that is one block."""

    def torch_model(self):
        from torch import nn

        return nn.Sequential(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


class Wrong(Mlp):
    """Blocks that compute something else than the model."""

    def torch_blocks(self, model):
        first, *others = mlp.torch_blocks(model)
        return [hvdtrain.Block(lambda x: first(x) * 2, *first.parts), *others]


class Left(Mlp):
    """A parameter that is in no block."""

    def tf_blocks(self, model):
        _, flatten, hidden, logits = model.layers
        return [flatten, hvdtrain.Block(hidden), logits]


class Unnamed(Mlp):
    """A block that uses a layer of a block of another stage."""

    def tf_blocks(self, model):
        _, flatten, hidden, logits = model.layers
        first = hidden.layers[0]
        last = hvdtrain.Block(lambda x: logits(x) + first.kernel[0, 0] * 0, logits)
        return [flatten, *hidden.layers, last]


class Twice(Mlp):
    """A loss that calls the model twice."""

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy

        outputs = model(batch["inputs"]) + model(batch["inputs"])
        return cross_entropy(outputs, batch["targets"], reduction="none"), {}


class Measured(Mlp):
    """Metrics of a whole evaluation, and a sample that cannot be read."""

    metrics = {"accuracy": "accuracy", "f1": "f1", "auc": "auc"}  # noqa: RUF012

    def train_data(self):
        arrays = self._train

        class Broken:
            def __len__(self):
                return len(arrays["inputs"])

            def __getitem__(self, index):
                if index == BAD_SAMPLE:
                    raise BadSampleError("cannot be read")
                return {name: array[index] for name, array in arrays.items()}

        return Broken()
