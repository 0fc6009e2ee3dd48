"""A callback that freezes or thaws parameters during the run is refused."""

from collections.abc import Mapping

from conformance.zoo import GRADIENT_DESCENT, Judge, Model


class Changing:
    """Changes the model after each step as the plain loop does."""

    every_rank = True

    def __init__(self, task):
        self.task = task

    def on_start(self, context):
        self.model = context.model

    def on_step(self, step, metrics):
        self.task.after_step(self.model, step.step)


class Thaw(Model):
    """The body is thawed after the second step."""

    defaults: Mapping[str, object] = {**GRADIENT_DESCENT, "momentum": 0.9}
    judge = Judge(workers=(1, 2), refused=("thawed or replaced during training", "parameter_groups"))
    frozen = True

    def torch_model(self):
        import torch

        torch.manual_seed(0)
        body = torch.nn.Linear(4, 8).requires_grad_(not self.frozen)
        return torch.nn.Sequential(body, torch.nn.Tanh(), torch.nn.Linear(8, 3))

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.Dense(3)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.layers[0].trainable = not self.frozen
        return model

    def after_step(self, model, step):
        if step == 2:
            self.change(model, True)

    def change(self, model, is_trained):
        if hasattr(model, "parameters"):
            model[0].requires_grad_(is_trained)
        else:
            model.layers[0].trainable = is_trained

    def callbacks(self):
        return [Changing(self)]
