"""A task whose samples are mixed, and the models of both frameworks."""

import numpy as np

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

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(36, 3)

            def forward(self, x):
                return self.head(x.flatten(1))

        return Net()

    def tf_model(self):
        import keras

        layers = [keras.Input((6, 6, 1)), keras.layers.Flatten(), keras.layers.Dense(3, name="head")]
        return keras.Sequential(layers)
