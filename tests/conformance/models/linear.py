"""Models that every trainer gets right."""

from conformance.zoo import Model


class Linear(Model):
    """One layer."""

    def torch_model(self):
        import torch

        return torch.nn.Linear(4, 3)

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
