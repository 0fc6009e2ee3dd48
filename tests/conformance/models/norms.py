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

        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 3))

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
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

        keras.utils.set_random_seed(0)
        layers = keras.layers
        frozen = layers.BatchNormalization(name="frozen")
        frozen.trainable = False
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Reshape((2, 2, 1)),
                layers.Conv2D(4, 2, padding="same"),
                layers.BatchNormalization(scale=False, momentum=0.5),
                layers.ReLU(),
                frozen,
                layers.GlobalAveragePooling2D(),
                layers.Dense(3),
            ]
        )


class OfSamples(Model):
    """Statistics of a sample alone: layers, groups, instances, root mean squares."""

    judge = Judge(workers=(1, 2))

    def torch_model(self):
        import torch
        from torch import nn

        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 8),
            nn.LayerNorm(8),
            nn.Unflatten(1, (4, 2)),
            nn.GroupNorm(2, 4),
            nn.InstanceNorm1d(4, affine=True),
            nn.Flatten(),
            nn.RMSNorm(8),
            nn.Linear(8, 3),
        )

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential(
            [
                keras.Input((4,)),
                layers.Dense(8),
                layers.LayerNormalization(),
                layers.Reshape((2, 4)),
                layers.GroupNormalization(2),
                layers.GroupNormalization(-1),
                layers.Flatten(),
                layers.RMSNormalization(),
                layers.UnitNormalization(),
                layers.Dense(3),
            ]
        )


class InstanceStatistics(Model):
    """An instance norm that keeps moving statistics, which are means over equal parts of the samples."""

    defaults: Mapping[str, object] = {**GRADIENT_DESCENT, "global_batch_size": 24}
    judge = Judge(workers=(1, 2))

    def train_data(self):
        return X[:24], Y[:24]

    def torch_model(self):
        import torch
        from torch import nn

        torch.manual_seed(0)
        norm = nn.InstanceNorm1d(4, affine=True, track_running_stats=True)
        return nn.Sequential(nn.Linear(4, 8), nn.Unflatten(1, (4, 2)), norm, nn.Flatten(), nn.Linear(8, 3))


class CumulativeBatchNorm(BatchNorm):
    """Moving statistics that are the mean of all steps: momentum None, which counts batches."""

    judge = Judge(frameworks=("torch",), workers=(1,))

    def torch_model(self):
        model = super().torch_model()
        model[1].momentum = None
        return model


class WeightNorm(Model):
    """Weights that are computed of a length and a direction by a parametrization."""

    judge = Judge(workers=(1, 2))

    def torch_model(self):
        import torch
        from torch.nn.utils.parametrizations import weight_norm

        torch.manual_seed(0)
        return torch.nn.Sequential(weight_norm(torch.nn.Linear(4, 8)), torch.nn.GELU(), torch.nn.Linear(8, 3))


class HookedWeightNorm(Model):
    """The same by the older function, which sets a plain attribute before each forward pass."""

    judge = Judge(workers=(1, 2))

    def torch_model(self):
        import warnings

        import torch

        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            layer = torch.nn.utils.weight_norm(torch.nn.Linear(4, 8))
        return torch.nn.Sequential(layer, torch.nn.GELU(), torch.nn.Linear(8, 3))


class SpectralNorm(Model):
    """Weights divided by their norm, which each training pass estimates anew in buffers."""

    def torch_model(self):
        import torch
        from torch.nn.utils.parametrizations import spectral_norm

        torch.manual_seed(0)
        return torch.nn.Sequential(
            spectral_norm(torch.nn.Linear(4, 8)), torch.nn.Tanh(), torch.nn.Linear(8, 3)
        )

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        layers = keras.layers
        return keras.Sequential(
            [keras.Input((4,)), layers.SpectralNormalization(layers.Dense(8, "tanh")), layers.Dense(3)]
        )


class StandardizedWeights(Model):
    """A convolution that normalizes its kernel in the forward pass, as in BiT and timm's ScaledStdConv."""

    judge = Judge(workers=(2,))

    def torch_model(self):
        import torch
        from torch import nn

        class Standardized(nn.Conv1d):
            def forward(self, x):
                mean = self.weight.mean((1, 2), keepdim=True)
                weight = (self.weight - mean) / (self.weight.var((1, 2), keepdim=True) + 1e-5).sqrt()
                return self._conv_forward(x, weight, self.bias)

        torch.manual_seed(0)
        return nn.Sequential(
            nn.Unflatten(1, (1, 4)), Standardized(1, 6, 3), nn.GroupNorm(3, 6), nn.Flatten(), nn.Linear(12, 3)
        )

    def tf_model(self):
        import keras

        class Standardized(keras.layers.Dense):
            def call(self, inputs):
                mean, variance = keras.ops.moments(self.kernel, axes=0, keepdims=True)
                return inputs @ ((self.kernel - mean) / keras.ops.sqrt(variance + 1e-5)) + self.bias

        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((4,)), Standardized(6), keras.layers.Dense(3)])


class ActNorm(Model):
    """Scale and shift that the first batch sets, as in Glow: a flag in a buffer says that it has."""

    judge = Judge(workers=(1,))

    def torch_model(self):
        import torch
        from torch import nn

        class ActNorm(nn.Module):
            def __init__(self):
                super().__init__()
                self.shift, self.scale = nn.Parameter(torch.zeros(8)), nn.Parameter(torch.ones(8))
                self.register_buffer("is_set", torch.zeros((), dtype=torch.uint8))

            def forward(self, x):
                if self.training and not self.is_set:
                    with torch.no_grad():
                        self.shift.copy_(-x.mean(0))
                        self.scale.copy_(1 / x.std(0))
                    self.is_set.fill_(1)
                return (x + self.shift) * self.scale

        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 8), ActNorm(), nn.Linear(8, 3))


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

        torch.manual_seed(0)
        linear = torch.nn.Linear(4, 3)
        linear.unused = torch.nn.BatchNorm1d(3).requires_grad_(False)
        return linear
