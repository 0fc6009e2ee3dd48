"""Tasks that are right, each with a mend of hvdtrain taken back in the processes that load this file.

The mend is chosen by the environment variable ``MEND_TAKEN_BACK``. Plain loops do not use what is changed.
"""

import os

from conformance.models.batch_losses import Triplets
from conformance.models.generators import InForward
from conformance.models.keras_masks import Regression
from conformance.models.learned_losses import ProxyLoss
from conformance.models.modes import FrozenBatchNorm
from conformance.models.sparse_gradients import Tables
from conformance.models.state import Counter, Observer
from conformance.zoo import Model, X

import hvdtrain


class Regularized(Model):
    """An L2 term that Keras adds to the loss."""

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        return keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, kernel_regularizer="l2")])


class Normalized(Model):
    """Statistics of the data, which an evaluation has from the checkpoint alone."""

    has_data = False

    def train_data(self):
        self.has_data = True
        return super().train_data()

    def tf_model(self):
        import keras

        keras.utils.set_random_seed(0)
        layer = keras.layers.Normalization()
        layer.build((None, 4))
        if self.has_data:
            layer.adapt(X * 3 + 1)
        return keras.Sequential([keras.Input((4,)), layer, keras.layers.Dense(3)])


class RowsAlone(Tables):
    """An optimizer that lets the rows of a table that had no gradient be, and decays the others."""

    def torch_optimizer(self, parameters):
        import torch

        class Rows(torch.optim.Optimizer):
            def step(self, closure=None):
                for group in self.param_groups:
                    for one in [one for one in group["params"] if one.grad is not None]:
                        rows, grad = slice(None), one.grad
                        if grad.is_sparse:
                            grad = grad.coalesce()
                            rows, grad = grad.indices()[0], grad.values()
                        one.data[rows] -= group["lr"] * (grad + one.data[rows])

        return Rows(parameters, {"lr": 0.1})

    def train_data(self):
        tokens, targets = super().train_data()
        return tokens.clip(2, 6), targets


def combine(kinds):
    """Take back that state is combined as the task says."""
    from hvdtrain.backends.replica_state import ReplicaState

    plain = ReplicaState._reduction
    ReplicaState._reduction = lambda self, tensor: kinds.get(plain(self, tensor), plain(self, tensor))


def change_gradients(change):
    """Let ``change(update, reduce)`` reduce gradients, in which ``reduce()`` does so."""
    from hvdtrain.backends.torch.steps import update

    reduce = update.Update.reduce
    update.Update.reduce = lambda self, vector: change(self, lambda: reduce(self, vector))


def peak():
    combine({"max": "mean"})


def seen():
    combine({"sum": "rank0"})


def proxies():
    """Take back that the parameters of a loss are trained."""

    def change(update, reduce):
        found = reduce()
        for one in [one for one in update._parameters if tuple(one.shape) in ((), (3, 3))]:
            one.grad.zero_()
        return found

    change_gradients(change)


def sparse():
    """Take back that an optimizer of the task's own is given sparse gradients."""

    def change(update, reduce):
        update._is_own = False
        return reduce()

    change_gradients(change)


def negatives():
    """Take back that losses see the samples of all workers."""
    from hvdtrain.backends.objective import gathering

    def own(tensor, positions=False):
        gathering.Gathering.built.is_used = True
        return gathering._alone(tensor, positions)

    hvdtrain.all_gather = own


def gradient():
    """Take back that the gradient of gathered rows is whole."""
    from hvdtrain.backends.objective.gathering import Gathering

    gather = hvdtrain.all_gather

    def smaller(tensor):
        rows, workers = gather(tensor), Gathering.built._workers
        share = 1 / workers.size if workers and rows.is_floating_point() else 1
        return rows if share == 1 else rows * share + rows.detach() * (1 - share)

    hvdtrain.all_gather = smaller


def mode():
    """Take back that ``train()`` and ``eval()`` of the model are called."""
    from hvdtrain.backends.torch import computation

    def enter_mode(self, training):
        for module in self.model.modules():
            module.training = training
        self.is_training = training

    computation.Computation.enter_mode = enter_mode


def draws():
    """Take back that numpy and Python are seeded in each step."""
    from hvdtrain.backends.torch import computation

    computation.seed_host_step = lambda seed: None


def normalization():
    """Take back that a layer loads its state itself."""
    import keras

    from hvdtrain.backends.tensorflow.state import layer_state

    layer_state._load = keras.Layer.load_own_variables


def masks():
    """Take back that masks reach the loss."""
    from hvdtrain.backends.tensorflow.objective import losses

    losses.mask_of = lambda outputs: None


def added():
    """Take back that what a model adds to the loss is trained."""
    from hvdtrain.backends.tensorflow import computation

    computation.add_to_loss = lambda losses, added: losses


# the mend: the task, the framework, the row that differs first, the first tensor and step, and the cause
TAKEN_BACK = {
    "peak": (Observer, "torch", "1 worker and 2", "step 1, peak", "'peak' is each worker's own"),
    "seen": (Counter, "tf", "1 worker and 2", "step 1, ", "is each worker's own"),
    "proxies": (ProxyLoss, "torch", "a plain loop", "step 1, loss/", ""),
    "negatives": (Triplets, "torch", "1 worker and 2", "step 1, the loss", "hvdtrain.all_gather"),
    "gradient": (Triplets, "torch", "1 worker and 2", "step 1, ", "depends on others"),
    "mode": (FrozenBatchNorm, "torch", "a plain loop", "step 1, the loss", ""),
    "normalization": (Normalized, "tf", "evaluated in batches of 11", "loss is ", "a model that is loaded"),
    "draws": (InForward, "torch", "a plain loop", "step 1, the loss", "random numbers of random and numpy"),
    "masks": (Regression, "tf", "a plain loop", "step 1, the loss", ""),
    "sparse": (RowsAlone, "torch", "a plain loop", "step 1, used/", ""),
    "added": (Regularized, "tf", "a plain loop", "step 1, the loss", ""),
}

if chosen := os.environ.get("MEND_TAKEN_BACK"):
    globals()[chosen]()
