"""Tasks whose models are split into stages; some do what is easily lost then."""

import itertools

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
    """A built-in model: six dense layers."""

    module, sizes = mlp, ((8, 8, 1), 10, (32,) * 5)

    def torch_model(self):
        return self.module.torch_model(*self.sizes)

    def torch_blocks(self, model):
        return self.module.torch_blocks(model)

    def tf_model(self):
        return self.module.tf_model(*self.sizes)

    def tf_blocks(self, model):
        return self.module.tf_blocks(model)


class Half(Mlp):
    """Dense layers of Keras that compute in float16."""

    def tf_model(self):
        import keras

        keras.config.set_dtype_policy("mixed_float16")
        try:
            return super().tf_model()
        finally:
            keras.config.set_dtype_policy("float32")


class Spectral(Plain):
    """Dense layers of Keras whose kernels are divided by what their forward passes move."""

    def tf_model(self):
        import keras

        dense = [keras.layers.Dense(16, name=f"dense{number}") for number in range(3)]
        layers = [keras.layers.SpectralNormalization(layer, name=f"norm_of_{layer.name}") for layer in dense]
        return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), *layers])


class ResNet(Mlp):
    """ResNet-18 with SiLU."""

    module, sizes = resnet, ((8, 8, 1), 10, 18, "cifar", "silu")


class Bert(Mlp):
    """A BERT, between whose blocks two tensors lead, of which one are booleans; pixels are 64 tokens."""

    module, sizes = bert, (17, 64, 2, 2, 16, 10, 0.0)

    def __init__(self):
        super().__init__()
        for part in (self._train, self._eval):
            part["inputs"] = np.rint(part["inputs"].reshape(-1, 64) * 6 + 4.9).astype(np.int32)


class Gpt(Bert):
    """A GPT, whose first and last block share the tokens' embedding, predicts each next pixel."""

    class_axis = -1
    module, sizes = gpt, (17, 16, 3, 2, 16, 0.0)

    def __init__(self):
        super().__init__()
        for part in (self._train, self._eval):
            tokens = part["inputs"]
            part["inputs"], part["targets"] = tokens[:, :15], tokens[:, 1:16].astype(np.int64)


class Lengths(Digits):
    """Samples of another length in each batch, a first block without parameters, then a dict and a tuple."""

    def collate(self, samples):
        size = 5 + int(samples[0]["targets"]) % 4
        return {
            "inputs": np.stack([sample["inputs"][:size] for sample in samples]),
            "targets": np.stack([sample["targets"] for sample in samples]),
        }

    def tf_model(self):
        import keras

        x = keras.Input((None, 8, 1))
        y = keras.layers.Dense(32, name="dense")(keras.layers.Reshape((-1, 8))(x))
        return keras.Model(x, keras.layers.Dense(10, name="logits")(keras.layers.GlobalAveragePooling1D()(y)))

    def tf_blocks(self, model):
        _, rows, dense, mean, logits = model.layers
        return [
            hvdtrain.Block(lambda x: {"rows": rows(x), "scale": (2.0,)}),
            hvdtrain.Block(lambda value: (dense(value["rows"]), value["scale"]), dense),
            hvdtrain.Block(lambda value: logits(mean(value[0])), logits),
        ]


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


def _dense(*sizes):
    from torch import nn

    return [nn.Linear(one, other) for one, other in itertools.pairwise(sizes)]


class Hazards(Mlp):
    """Blocks that change whole numbers in place, and ask whether the model is in training."""

    def torch_model(self):
        import torch
        from torch import nn

        class Twice(nn.Module):
            def forward(self, x):
                return x * 2 if self.training else x

        class Model(nn.ModuleDict):
            def first(self, x):
                x = self["hidden"](x.flatten(1)).tanh()
                return x * 3 if self.training else x, torch.zeros(32, dtype=torch.int64)

            def second(self, value):
                x, count = value
                count += 1
                return self["middle"](x * count).tanh(), count

            def third(self, value):
                return self["twice"](self["logits"](value[0] * value[1]))

            def forward(self, x):
                return self.third(self.second(self.first(x)))

        dense = zip(("hidden", "middle", "logits"), _dense(64, 32, 32, 10), strict=True)
        return Model({**dict(dense), "twice": Twice()})

    def torch_blocks(self, model):
        steps = model.first, model.second, model.third
        return [hvdtrain.Block(step, model[name]) for step, name in zip(steps, list(model)[:3], strict=True)]


class Moving(Plain):
    """Modules that work in place, and statistics that move in new tensors, on which the outputs depend."""

    def torch_model(self):
        import torch
        from torch import nn

        class Shift(nn.Module):
            def forward(self, x):
                return x.add_(0.5)

        class Count(nn.Module):
            def __init__(self):
                super().__init__()
                self.register_buffer("count", torch.zeros(1))

            def forward(self, x):
                x = x * (1 + self.count / 20)
                if self.training:
                    self.count = self.count + 1
                return x

        first, second, third = _dense(64, 32, 32, 10)
        before = Shift(), nn.Flatten(), Count(), first, nn.SiLU(inplace=True)
        return nn.Sequential(*before, second, nn.ReLU(inplace=True), Count(), third)


class OwnForward(Plain):
    """A sequential model whose own forward pass does more than to call its modules."""

    def torch_model(self):
        from torch import nn

        class Model(nn.Sequential):
            def forward(self, x):
                return super().forward(x) * 2

        return Model(nn.Flatten(), *_dense(64, 32), nn.Tanh(), *_dense(32, 10))


class RegularizedAtTheEnd(Plain):
    """A regularizer in the last stage alone, whose error rank 0 does not have."""

    def tf_model(self):
        import keras

        last = keras.layers.Dense(10, kernel_regularizer="l2")
        layers = [keras.layers.Flatten(), keras.layers.Dense(32, activation="tanh"), last]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])


class DropsOut(Plain):
    """A loss that is proportional to the first kernel, with dropout in the first stage."""

    def torch_model(self):
        from torch import nn

        first, last = nn.Linear(64, 32, bias=False), nn.Linear(32, 4, bias=False)
        return nn.Sequential(nn.Flatten(), first, nn.Dropout(0.5), last)

    metrics = {}  # noqa: RUF012

    @staticmethod
    def loss(outputs, batch):
        return outputs.mean(-1) if hasattr(outputs, "mean") else sum(outputs[:, i] for i in range(4)) / 4

    def tf_model(self):
        import keras

        dense = [keras.layers.Dense(size, use_bias=False) for size in (32, 4)]
        layers = [keras.layers.Flatten(), dense[0], keras.layers.Dropout(0.5), dense[1]]
        return keras.Sequential([keras.Input((8, 8, 1)), *layers])


class TrainsOtherwise(DropsOut):
    """Blocks that leave the dropout out, which the model has in training alone."""

    def torch_blocks(self, model):
        return [model[0], model[1], model[3]]
