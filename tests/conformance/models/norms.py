"""Layers of normalization, of activations and of weights."""

from collections.abc import Mapping

from conformance.zoo import GRADIENT_DESCENT, Judge, Model, X, Y

import hvdtrain

SYNCHRONIZED = Judge(options=("--sync-batch-norm",))


class BatchNorm(Model):
    """Statistics of the whole batch, and the moving ones in evaluation, with one worker."""

    judge = Judge(workers=(1,))

    def torch_model(self):
        import torch

        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    def tf_model(self):
        import keras

        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.Dense(8), layers.BatchNormalization(), layers.Dense(3)]
        )


class SynchronizedBatchNorm(BatchNorm):
    """The same with several workers; nothing is evaluated, as moving variances are biased here."""

    judge = Judge(frameworks=("torch",), options=SYNCHRONIZED.options)

    def eval_data(self):
        return None


class SynchronizedInKeras(BatchNorm):
    """The same, evaluated, with images, a layer without scale and one that is not trained."""

    judge = Judge(frameworks=("tf",), options=SYNCHRONIZED.options)

    def tf_model(self):
        import keras

        layers = keras.layers
        norms = [layers.BatchNormalization(scale=False, momentum=0.5), layers.BatchNormalization()]
        norms[1].trainable = False
        before = keras.Input((4,)), layers.Reshape((2, 2, 1)), layers.Conv2D(4, 2, padding="same")
        after = layers.ReLU(), norms[1], layers.GlobalAveragePooling2D(), layers.Dense(3)
        return keras.Sequential([*before, norms[0], *after])


class InstanceStatistics(Model):
    """An instance norm that keeps moving statistics, which are means over equal parts of the samples."""

    defaults: Mapping[str, object] = {**GRADIENT_DESCENT, "global_batch_size": 24}

    def train_data(self):
        return X[:24], Y[:24]

    def torch_model(self):
        from torch import nn

        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (4, 2)), norm, nn.Flatten(), nn.Linear(8, 3))


class CumulativeBatchNorm(BatchNorm):
    """Moving statistics that are the mean of all steps: momentum None, which counts batches."""

    judge = Judge(frameworks=("torch",), workers=(1,))

    def torch_model(self):
        model = super().torch_model()
        model[1].momentum = None
        return model


class HookedWeightNorm(Model):
    """The same by the older function, which sets a plain attribute before each forward pass."""

    def torch_model(self):
        import warnings

        import torch

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            layer = torch.nn.utils.weight_norm(torch.nn.Linear(4, 8))
        return torch.nn.Sequential(layer, torch.nn.GELU(), torch.nn.Linear(8, 3))


class SpectralNorm(Model):
    """Weights divided by their norm, which each training pass estimates anew in buffers."""

    def torch_model(self):
        import torch
        from torch.nn.utils.parametrizations import spectral_norm

        return torch.nn.Sequential(
            spectral_norm(torch.nn.Linear(4, 8)), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )

    def tf_model(self):
        import keras

        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.SpectralNormalization(layers.Dense(8, "tanh")), layers.Dense(3)]
        )


class SingleRows(Model):
    """Some micro-batches have one sample, of which the loss gives the mean."""

    judge = Judge(("torch",), (1, 2), options=("--accumulate", "12"))

    def eval_data(self):
        return None

    def torch_loss(self, model, batch):
        from torch.nn.functional import cross_entropy

        losses = cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")
        return hvdtrain.Weighted(losses.mean(), len(losses)), {}

    def torch_model(self):
        import torch

        linear = torch.nn.Linear(4, 3)
        linear.unused = torch.nn.BatchNorm1d(3).requires_grad_(False)
        return linear
