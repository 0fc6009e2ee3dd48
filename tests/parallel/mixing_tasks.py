"""Tasks whose samples are mixed, drawn or sorted by length, and the models of both frameworks."""

from collections import OrderedDict

import numpy as np

import hvdtrain

RANDOM = np.random.RandomState(0)
IMAGES = RANDOM.rand(25, 6, 6, 1).astype(np.float32)
LABELS = RANDOM.randint(0, 3, 25)


class Images:
    loss = "cross_entropy"
    class_weights = (1.0, 2.0, 3.0)

    def __init__(self):
        self.metrics = {"accuracy": "accuracy"}

    def train_data(self):
        return IMAGES, LABELS

    def eval_data(self):
        return IMAGES[:11], LABELS[:11]

    def sample_probabilities(self):
        return 1 / np.bincount(LABELS)[LABELS]

    def torch_model(self):
        from torch import nn

        return nn.Sequential(OrderedDict(flat=nn.Flatten(), head=nn.Linear(36, 3)))

    def tf_model(self):
        import keras

        layers = [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3, name="head")]
        return keras.Sequential(layers)


TEXTS = [RANDOM.randint(1, 9, length) for length in RANDOM.randint(1, 20, 50)]
KINDS = np.asarray([text[0] % 3 for text in TEXTS])


class Texts:
    """Texts of unequal lengths: those of similar length make a batch. A model of the sum of their vectors."""

    loss = "cross_entropy"

    def __init__(self):
        self.metrics = {"accuracy": "accuracy"}
        self.collate = hvdtrain.pad({"inputs": 0}, multiple=1)

    def train_data(self):
        return [{"inputs": text, "targets": kind} for text, kind in zip(TEXTS, KINDS, strict=True)]

    def eval_data(self):
        return self.train_data()[:11]

    def sample_lengths(self):
        return [len(text) for text in TEXTS]

    def torch_model(self):
        from torch import nn

        vectors = nn.EmbeddingBag(9, 4, mode="sum", padding_idx=0)
        return nn.Sequential(OrderedDict(vectors=vectors, head=nn.Linear(4, 3)))

    def tf_model(self):
        import keras

        inputs = keras.Input((None,), dtype="int32")
        vectors = keras.layers.Embedding(9, 4, mask_zero=True, name="vectors")(inputs)
        mask = keras.ops.cast(keras.ops.not_equal(inputs, 0), "float32")[..., None]
        summed = keras.ops.sum(vectors * mask, axis=1)
        return keras.Model(inputs, keras.layers.Dense(3, name="head")(summed))
