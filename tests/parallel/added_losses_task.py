"""A model whose weights and activations are regularized; in PyTorch, the same objective by hand."""

from collections import OrderedDict

from small_task import INPUTS, OUTPUTS, Small

WEIGHTS, ACTIVITIES = 0.02, 0.05


class Regularized(Small):
    metrics = {}  # noqa: RUF012
    defaults = {"global_batch_size": 12, "learning_rate": 0.05, "epochs": 1, "log_every": 1,  # noqa: RUF012
                "initial_parameters": "portable"}  # fmt: skip

    def __init__(self):
        super().__init__(samples=96)

    def eval_data(self):
        inputs, targets = self.data  # no batch is padded: activities of padding count
        return {"inputs": inputs[:24], "targets": targets[:24]}

    def torch_model(self):
        from torch import nn

        return nn.Sequential(OrderedDict(dense=nn.Linear(INPUTS, OUTPUTS)))

    def torch_loss(self, model, batch):
        outputs = model(batch["inputs"])
        added = WEIGHTS * (model.dense.weight**2).sum() + ACTIVITIES * (outputs**2).sum() / len(outputs)
        losses = ((outputs - batch["targets"]) ** 2).mean(1)
        return losses + added, {"regularization_loss": added.expand(len(outputs))}

    def tf_model(self):
        import keras

        inputs = keras.Input((INPUTS,))
        dense = keras.layers.Dense(
            OUTPUTS,
            name="dense",
            kernel_regularizer=keras.regularizers.L2(WEIGHTS),
            activity_regularizer=keras.regularizers.L2(ACTIVITIES),
        )
        return keras.Model(inputs, dense(inputs))


class Lightning(Regularized):
    """A module that brings methods for another trainer."""

    def torch_model(self):
        from torch import nn

        class Module(nn.Sequential):
            def training_step(self, batch, index):
                raise AssertionError("never called")

            def configure_optimizers(self):
                raise AssertionError("never called")

        return Module(OrderedDict(dense=nn.Linear(INPUTS, OUTPUTS)))
