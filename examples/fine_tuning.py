"""Fine-tuning: a net that has learnt the digits 0 to 4 learns all ten of them from few images.

    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/fine_tuning.py:LowDigits \
        --run-dir runs/low
    horovodrun -np 2 python -m hvdtrain --framework torch --task examples/fine_tuning.py:FewDigits \
        --init runs/low --init-skip 'model/dense2/*'

The second job takes the weights of the first one but its head, dense2, which has 5 outputs there and 10 here.
It does not train the first convolution, trains the rest of the backbone at a tenth of the learning rate and
the new head at the full one, and lowers the rates when the loss of the evaluation stops getting better. Both
jobs run with --framework tf as well, also the second one from a checkpoint of the first one in PyTorch.
"""

from hvdtrain.models import convnet
from hvdtrain.tasks.digits import Digits


class LowDigits(Digits):
    """The digits 0 to 4 of scikit-learn's: the task that the net is trained on first."""

    classes = 5
    defaults = {**Digits.defaults, "epochs": 6}

    def __init__(self):
        super().__init__()
        self._train, self._eval = (only_below(5, data) for data in (self._train, self._eval))

    def torch_model(self):
        return convnet.torch_model((8, 8, 1), self.classes)

    def tf_model(self):
        return convnet.tf_model((8, 8, 1), self.classes)


class FewDigits(LowDigits):
    """All ten digits, of which there are few to train on.

    Args:
        samples: number of images to train on; set it with ``--set task_options.samples=200``.
    """

    classes = 10
    defaults = {
        "epochs": 20,
        "batch_size": 8,
        "optimizer": "adamw",
        "learning_rate": 0.002,
        "warmup_epochs": 1,
        "lr_schedule": "plateau",
        "lr_final_fraction": 0.01,
        "initial_parameters": "portable",  # drawn by name, so the new head is equal in both frameworks
        "parameter_groups": [
            {"match": "model/conv1/*", "frozen": True},
            {"match": "model/dense2/*", "learning_rate_factor": 1},
            {"match": "*", "learning_rate_factor": 0.1},
        ],
    }

    def __init__(self, samples=100):
        Digits.__init__(self)
        self._train = {name: array[:samples] for name, array in self._train.items()}


def only_below(limit, data):
    """Return the images of the digits below a limit."""
    chosen = data["targets"] < limit
    return {name: array[chosen] for name, array in data.items()}
