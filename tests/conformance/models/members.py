"""Members of a task that are misspelt or of another trainer get a note; training is as without them."""

from conformance.models.linear import Linear
from conformance.zoo import Judge


class Misspelt(Linear):
    """Members as people write them."""

    judge = Judge(
        workers=(2,),
        noted=(
            "the task has torch_optimiser(), which hvdtrain does not know; did you mean torch_optimizer()?",
            "the task has metric, which hvdtrain does not know; did you mean metrics?",
            "the task has training_step(), which hvdtrain does not know; here torch_loss(model, batch)",
            "the task has val_dataloader(), which hvdtrain does not know; eval_data() returns",
        ),
    )
    metric = None

    def torch_optimiser(self, parameters):
        return None

    def training_step(self, batch):
        return None

    def val_dataloader(self):
        return None


class OfLightning(Linear):
    """A model that brings methods for another trainer."""

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
