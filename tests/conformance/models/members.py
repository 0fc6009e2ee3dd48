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
