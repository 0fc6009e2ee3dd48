"""A model with two inputs, an image and a table: the price of a parcel, in both frameworks.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/two_inputs.py:Parcels
    horovodrun -np 2 python -m hvdtrain --framework tf --task examples/two_inputs.py:Parcels

The image is the scan of a digit, which is the zone of the parcel; the table has its weight and its three
sides. The parts of ``inputs`` have the names of the arguments of ``forward`` and of the ``keras.Input``.
"""

import numpy as np
from sklearn.datasets import load_digits

MEASURES, HELD_OUT = 4, 300


class Parcels:
    """Predict the price from the scan and the measures."""

    loss = "mse"
    metrics = {"mae": "mae"}
    defaults = {
        "epochs": 10,
        "batch_size": 32,
        "learning_rate": 0.05,
        "warmup_epochs": 1,
        "lr_schedule": "cosine",
        "clip_norm": 1.0,
        "initial_parameters": "portable",  # drawn by name, so both frameworks start from equal values
    }

    def __init__(self):
        random = np.random.RandomState(0)
        scans, zones = load_digits(return_X_y=True)
        order = random.permutation(len(zones))
        scans, zones = scans[order], zones[order]
        measures = random.uniform(0, 1, (len(zones), MEASURES))
        weight, sides = measures[:, 0], measures[:, 1:]
        self.images = ((scans - 4.9) / 6.0).reshape(-1, 8, 8, 1)
        self.tables = (measures - 0.5) / 0.29
        self.prices = (2 + 0.5 * zones) * (1 + weight) + 4 * sides.prod(1)

    def train_data(self):
        return self.part(slice(HELD_OUT, None))

    def eval_data(self):
        return self.part(slice(HELD_OUT))

    def part(self, rows):
        inputs = {"image": self.images[rows], "table": self.tables[rows]}
        return inputs, self.prices[rows, None]

    def torch_model(self):
        import torch
        from torch import nn
        from torch.nn.functional import silu

        class Model(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(1, 16, 3)
                self.scan = nn.Linear(6 * 6 * 16, 32)
                self.measures = nn.Linear(MEASURES, 32)
                self.both = nn.Linear(64, 32)
                self.price = nn.Linear(32, 1)

            def forward(self, image, table):
                # PyTorch's convolutions have the channels first; Keras's, and the data here, last
                features = silu(self.conv(image.movedim(-1, 1))).movedim(1, -1).flatten(1)
                parts = [silu(self.scan(features)), silu(self.measures(table))]
                return self.price(silu(self.both(torch.cat(parts, -1))))

        return Model()

    def tf_model(self):
        import keras
        from keras import layers

        image, table = keras.Input((8, 8, 1), name="image"), keras.Input((MEASURES,), name="table")
        features = layers.Flatten()(layers.Conv2D(16, 3, activation="silu", name="conv")(image))
        parts = [
            layers.Dense(32, activation="silu", name="scan")(features),
            layers.Dense(32, activation="silu", name="measures")(table),
        ]
        joined = layers.Dense(32, activation="silu", name="both")(layers.Concatenate()(parts))
        return keras.Model([image, table], layers.Dense(1, name="price")(joined))
