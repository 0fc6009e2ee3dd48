"""A training step of your own: two networks that are trained against each other draw digits.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/gan.py:DigitGan

The generator makes images of 8x8 pixels out of noise; the discriminator tells them from the 1,797 scans of
scikit-learn. Each has its own optimizer. Images of the trained generator:

    python -m hvdtrain predict runs/NAME --task examples/gan.py:DigitGan --output drawn.npz
"""

import numpy as np
from sklearn.datasets import load_digits

PIXELS, NOISE, HIDDEN = 64, 16, 128


class Scans:
    """The scans, with values from -1 to 1, each with noise that is new in every epoch."""

    def __init__(self, images):
        self._images = images

    def __len__(self):
        return len(self._images)

    def __getitem__(self, index):
        return {name: array[0] for name, array in self.augmented([index], [index]).items()}

    def augmented(self, indices, keys):
        # a key is a seed that depends on the job's seed, the epoch and the sample, but not on the worker
        noise = [np.random.default_rng(int(key)).standard_normal(NOISE) for key in keys]
        return {"image": self._images[indices], "noise": np.asarray(noise, np.float32)}


class DigitGan:
    """A generative adversarial network on the digits."""

    defaults = {"epochs": 40, "batch_size": 32, "lr_scaling": "sqrt"}

    def __init__(self):
        images, _ = load_digits(return_X_y=True)
        self._images = (images / 8 - 1).astype(np.float32)

    def train_data(self):
        return Scans(self._images)

    def eval_data(self):
        return None  # there is no loss to evaluate

    def predict_data(self):
        return {"noise": np.random.RandomState(0).standard_normal((100, NOISE)).astype(np.float32)}

    def torch_model(self):
        from torch import nn

        def network(inputs, outputs, *last):
            return nn.Sequential(
                nn.Linear(inputs, HIDDEN),
                nn.LeakyReLU(0.2),
                nn.Linear(HIDDEN, HIDDEN),
                nn.LeakyReLU(0.2),
                nn.Linear(HIDDEN, outputs),
                *last,
            )

        networks = {"generator": network(NOISE, PIXELS, nn.Tanh()), "discriminator": network(PIXELS, 1)}
        return nn.ModuleDict(networks)

    def torch_optimizers(self, model):
        import torch

        return {
            name: torch.optim.Adam(network.parameters(), 5e-4, betas=(0.5, 0.999))
            for name, network in model.items()
        }

    def torch_step(self, model, batch, optimizers):
        from torch.nn.functional import softplus

        fake = model["generator"](batch["noise"])
        judged_real = model["discriminator"](batch["image"]).squeeze(-1)
        judged_fake = model["discriminator"](fake.detach()).squeeze(-1)
        d_losses = softplus(-judged_real) + softplus(judged_fake)  # one for each sample
        optimizers["discriminator"].minimize(d_losses)

        g_losses = softplus(-model["discriminator"](fake).squeeze(-1))
        optimizers["generator"].minimize(g_losses)
        told_apart = ((judged_real > 0).float() + (judged_fake < 0).float()) / 2
        return g_losses, {"discriminator_loss": d_losses, "told_apart": told_apart}

    def torch_serve(self, model, batch):
        return model["generator"](batch["noise"])

    def tf_model(self):
        import keras
        from keras import layers

        def network(inputs, outputs, activation=None):
            hidden = (
                layers.Dense(HIDDEN),
                layers.LeakyReLU(0.2),
                layers.Dense(HIDDEN),
                layers.LeakyReLU(0.2),
            )
            return keras.Sequential(
                [keras.Input((inputs,)), *hidden, layers.Dense(outputs, activation=activation)]
            )

        class Networks(keras.Model):
            def __init__(self):
                super().__init__()
                self.generator = network(NOISE, PIXELS, "tanh")
                self.discriminator = network(PIXELS, 1)
                self.built = True

        return Networks()

    def tf_optimizers(self, model):
        import keras

        networks = {"generator": model.generator, "discriminator": model.discriminator}
        return {
            name: (keras.optimizers.Adam(5e-4, beta_1=0.5, epsilon=1e-8), network.trainable_variables)
            for name, network in networks.items()
        }

    def tf_step(self, model, batch, optimizers):
        import tensorflow as tf

        def judged(images):
            return tf.squeeze(model.discriminator(images), -1)

        with tf.GradientTape() as tape:
            fake = model.generator(batch["noise"])
            judged_real, judged_fake = judged(batch["image"]), judged(tf.stop_gradient(fake))
            d_losses = tf.nn.softplus(-judged_real) + tf.nn.softplus(judged_fake)  # one for each sample
        optimizers["discriminator"].minimize(d_losses, tape)

        with tf.GradientTape() as tape:
            g_losses = tf.nn.softplus(-judged(model.generator(batch["noise"])))
        optimizers["generator"].minimize(g_losses, tape)
        told_apart = (tf.cast(judged_real > 0, tf.float32) + tf.cast(judged_fake < 0, tf.float32)) / 2
        return g_losses, {"discriminator_loss": d_losses, "told_apart": told_apart}

    def tf_serve(self, model, batch):
        return model.generator(batch["noise"])
