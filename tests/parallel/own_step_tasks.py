"""Tasks with training steps of their own, for both frameworks."""

import os

import numpy as np
from small_task import INPUTS, Small

RADIUS = 0.05  # how far SAM goes
NOISE, HIDDEN = 3, 8


class Fit(Small):
    """Fit a random map, as usual: what ``Plain`` does in a step of its own."""

    defaults = {  # noqa: RUF012
        "global_batch_size": 24,
        "learning_rate": 0.02,
        "steps": 8,
        "log_every": 1,
        "optimizer": "adamw",
        "weight_decay": 0.01,
        "initial_parameters": "portable",
    }

    def torch_loss(self, model, batch):
        errors = model(batch["inputs"]) - batch["targets"]
        return (errors**2).mean(-1), {"mae": errors.abs().mean(-1)}

    def tf_loss(self, model, batch):
        import tensorflow as tf

        errors = model(batch["inputs"]) - batch["targets"]
        return tf.reduce_mean(errors**2, -1), {"mae": tf.reduce_mean(tf.abs(errors), -1)}


class Plain(Fit):
    """The same in a step of its own."""

    def torch_step(self, model, batch, optimizers):
        losses, metrics = self.torch_loss(model, batch)
        optimizers["main"].minimize(losses)
        return losses, metrics

    def tf_step(self, model, batch, optimizers):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            losses, metrics = self.tf_loss(model, batch)
        optimizers["main"].minimize(losses, tape)
        return losses, metrics


class Sam(Fit):
    """Sharpness-aware minimization: the gradient of a step is that at the worst point nearby."""

    def torch_step(self, model, batch, optimizers):
        import torch

        main = optimizers["main"]
        losses, metrics = self.torch_loss(model, batch)
        gradients = main.gradients(losses)
        norm = torch.stack([(g**2).sum() for g in gradients]).sum().sqrt()
        before = [v.detach().clone() for v in main.variables]
        with torch.no_grad():
            for variable, gradient in zip(main.variables, gradients, strict=True):
                variable.add_(gradient, alpha=float(RADIUS / norm))
        gradients = main.gradients(self.torch_loss(model, batch)[0])
        with torch.no_grad():
            for variable, value in zip(main.variables, before, strict=True):
                variable.copy_(value)
        main.apply(gradients)
        return losses, metrics

    def tf_step(self, model, batch, optimizers):
        import tensorflow as tf

        main = optimizers["main"]
        with tf.GradientTape() as tape:
            losses, metrics = self.tf_loss(model, batch)
        gradients = main.gradients(losses, tape)
        before = [tf.identity(v) for v in main.variables]
        norm = tf.linalg.global_norm(gradients)
        for variable, gradient in zip(main.variables, gradients, strict=True):
            variable.assign_add(RADIUS / norm * gradient)
        with tf.GradientTape() as tape:
            worst, _ = self.tf_loss(model, batch)
        gradients = main.gradients(worst, tape)
        for variable, value in zip(main.variables, before, strict=True):
            variable.assign(value)
        main.apply(gradients)
        return losses, metrics


class Gan:
    """Two networks with an optimizer each, and no loss: there is nothing to evaluate."""

    defaults = {  # noqa: RUF012
        "global_batch_size": 24,
        "steps": 8,
        "log_every": 1,
        "initial_parameters": "portable",
    }

    def __init__(self):
        random = np.random.RandomState(4)
        self.data = {
            "inputs": random.randn(100, INPUTS).astype("float32") * 0.5 + 1,
            "noise": random.randn(100, NOISE).astype("float32"),
        }

    def train_data(self):
        return self.data

    def eval_data(self):
        return None

    def torch_model(self):
        from torch import nn

        def layers(inputs, outputs):
            return nn.Sequential(nn.Linear(inputs, HIDDEN), nn.Tanh(), nn.Linear(HIDDEN, outputs))

        return nn.ModuleDict({"generator": layers(NOISE, INPUTS), "discriminator": layers(INPUTS, 1)})

    def torch_optimizers(self, model):
        import torch

        return {
            "generator": torch.optim.SGD(model["generator"].parameters(), 0.02, momentum=0.9),
            "discriminator": torch.optim.Adam(model["discriminator"].parameters(), 0.005),
        }

    def torch_step(self, model, batch, optimizers):
        from torch.nn.functional import softplus

        generator, discriminator = model["generator"], model["discriminator"]
        fake = generator(batch["noise"])
        real, made = discriminator(batch["inputs"]), discriminator(fake.detach())
        d_losses = (softplus(-real) + softplus(made)).squeeze(-1)
        optimizers["discriminator"].minimize(d_losses)
        g_losses = softplus(-discriminator(fake)).squeeze(-1)
        if self.trains_generator(optimizers.step):
            optimizers["generator"].minimize(g_losses)
        return g_losses, {"discriminator_loss": d_losses}

    def tf_model(self):
        import keras
        from keras import layers

        def network(inputs, outputs, name):
            parts = [layers.Dense(HIDDEN, activation="tanh", name="0"), layers.Dense(outputs, name="2")]
            return keras.Sequential([keras.Input((inputs,)), *parts], name=name)

        class Networks(keras.Model):
            def __init__(self):
                super().__init__()
                self.generator = network(NOISE, INPUTS, "generator")
                self.discriminator = network(INPUTS, 1, "discriminator")
                self.built = True

        return Networks()

    def tf_optimizers(self, model):
        import keras

        optimizers = {
            "generator": keras.optimizers.SGD(0.02, momentum=0.9),
            "discriminator": keras.optimizers.Adam(0.005),
        }
        return {name: (one, getattr(model, name).trainable_variables) for name, one in optimizers.items()}

    def tf_step(self, model, batch, optimizers):
        import tensorflow as tf

        with tf.GradientTape(persistent=True) as tape:
            fake = model.generator(batch["noise"])
            real, made = model.discriminator(batch["inputs"]), model.discriminator(tf.stop_gradient(fake))
            d_losses = tf.squeeze(tf.nn.softplus(-real) + tf.nn.softplus(made), -1)
        optimizers["discriminator"].minimize(d_losses, tape)
        with tf.GradientTape() as tape:
            g_losses = tf.squeeze(tf.nn.softplus(-model.discriminator(model.generator(batch["noise"]))), -1)
        if self.trains_generator(optimizers.step):
            optimizers["generator"].minimize(g_losses, tape)
        return g_losses, {"discriminator_loss": d_losses}

    def trains_generator(self, step):
        return True


class Alternating(Gan):
    """The generator takes every third step, and none before the second."""

    def trains_generator(self, step):
        return step % 3 == 2


class Apart(Gan):
    """The generator is trained by one worker alone, from the second step on: a decision by its own losses."""

    def trains_generator(self, step):
        rank = os.environ.get("HOROVOD_RANK", os.environ.get("OMPI_COMM_WORLD_RANK"))
        return step == 0 or rank == "1"


class NoLoss(Gan):
    """Evaluation data, and nothing that says what to compute with them."""

    def eval_data(self):
        return self.data


class Backward(Fit):
    """A step as it is written elsewhere."""

    def torch_step(self, model, batch, optimizers):
        losses, metrics = self.torch_loss(model, batch)
        losses.mean().backward()
        return losses, metrics


class StepsAlone(Plain):
    """A step of the framework's optimizer, which the task has kept."""

    def torch_optimizer(self, parameters):
        import torch

        self.kept = torch.optim.SGD(parameters, 0.02)
        return self.kept

    def tf_optimizer(self):
        import keras

        self.kept = keras.optimizers.SGD(0.02)
        return self.kept

    def torch_step(self, model, batch, optimizers):
        self.kept.step()
        return self.torch_loss(model, batch)

    def tf_step(self, model, batch, optimizers):
        variables = model.trainable_variables
        self.kept.apply_gradients((variable.value, variable) for variable in variables)
        return self.tf_loss(model, batch)
