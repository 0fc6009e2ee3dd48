"""Models that every trainer gets right."""

from conformance.zoo import Judge, Model


class Linear(Model):
    """One layer."""

    def torch_model(self):
        import torch

        return torch.nn.Linear(4, 3)

    def tf_model(self):
        import keras

        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])


class OfLightning(Linear):
    """A model that brings methods for another trainer gets a note."""

    judge = Judge(
        frameworks=("torch",),
        workers=(2,),
        noted=("training_step and configure_optimizers of the model (of PyTorch Lightning)",),
    )

    def torch_model(self):
        model = super().torch_model()

        class Lightning(type(model)):
            def training_step(self, batch, index):
                raise AssertionError("never called")

            def configure_optimizers(self):
                raise AssertionError("never called")

        model.__class__ = Lightning
        return model
